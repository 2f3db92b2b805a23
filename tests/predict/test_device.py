"""Data sheets of devices against their sources, and the roofline model's arithmetic."""

from __future__ import annotations

import pytest

from rooflab.roofline.device import DEVICES, Device, get_device, identify, resolve
from rooflab.roofline.model import Ceilings, Cost, bound

MATRIX_FLOPS_PER_CLOCK_PER_SM = {
    "a100": 2048,
    "h100": 4096,
    "h200": 4096,
    "gh200": 4096,
    "b200": 8192,
    "l4": 1024,
    "l40s": 1024,
    "rtx": 512,
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_figures_of_a_card_agree_with_each_other(device: Device) -> None:
    family = device.name.split("-")[0]
    per_clock = MATRIX_FLOPS_PER_CLOCK_PER_SM[family]
    assert device.matrix_flops_per_clock_per_sm("bf16") == pytest.approx(per_clock, rel=5e-3)
    assert device.matrix_flops_per_clock_per_sm("tf32") == pytest.approx(per_clock / 2, rel=2e-2)
    lanes = 64 if family == "a100" else 128
    clock_hz = device.vector_flops_per_s / (2 * lanes * device.sms)
    assert device.boost_clock_hz * 0.99 <= clock_hz <= device.max_clock_hz * 1.01
    assert device.boost_clock_hz <= device.max_clock_hz
    assert (device.nvlink_gpus > 1) == (device.nvlink_bytes_per_s > 0)
    assert device.registers_per_sm == 65_536
    rates = device.matrix_flops_per_s  # dense, and with fp32 accumulation
    assert rates["fp16"] == rates["bf16"]
    assert rates.get("fp8_e4m3", 2 * rates["bf16"]) == pytest.approx(2 * rates["bf16"], rel=3e-2)
    assert device.sfu_ops_per_s == 16 * device.sms * device.boost_clock_hz
    assert all(device.source.values())


def test_ceilings_price_ieee_fp32_at_the_vector_rate_and_tf32_apart() -> None:
    ceilings = get_device("h100-sxm").ceilings()
    assert ceilings.kind == "datasheet"
    assert ceilings.matrix_rate("fp32") == ceilings.vector_flops_per_s == pytest.approx(66.9e12)
    assert ceilings.matrix_rate("tf32") == pytest.approx(494.7e12)
    assert ceilings.ridge("bf16") == pytest.approx(295.3, rel=1e-3)


def test_ceilings_at_a_clock_scale_arithmetic_and_leave_memory() -> None:
    device = get_device("h200")
    sheet, held = device.ceilings(), device.ceilings(clock_hz=1.83e9 / 2)
    assert held.kind == "at_clock"
    assert held.matrix_rate("bf16") == pytest.approx(sheet.matrix_rate("bf16") / 2)
    assert held.vector_flops_per_s == pytest.approx(2 * 128 * 132 * 1.83e9 / 2)
    assert held.sfu_ops_per_s == pytest.approx(16 * 132 * 1.83e9 / 2)
    assert held.hbm_bytes_per_s == sheet.hbm_bytes_per_s
    with pytest.raises(ValueError, match=r"clock_hz: expected 0 < clock_hz <= 1.98e\+09, got 3e\+09"):
        device.ceilings(clock_hz=3e9)


def test_h100_means_sxm_and_says_so() -> None:
    device, note = resolve("H100")
    assert device.name == "h100-sxm"
    assert note is not None and "h100-sxm" in note and "h100-pcie" in note and "h100-nvl" in note
    assert "a100-40gb" in str(resolve("a100")[1])
    for name in ["H100_PCIe", "h100 pcie", "h100-pcie"]:
        assert resolve(name) == (DEVICES["h100-pcie"], None), "a full name needs no note"


CEILINGS = Ceilings("toy", "datasheet", 100.0, {"bf16": 1000.0, "fp32": 50.0}, 50.0, 10.0, 0.5)


def test_bound_is_the_largest_part() -> None:
    for cost, seconds, limiter in [
        (Cost(150, 50), 2.0, "memory"),
        (Cost(1, 1, {"bf16": 3000.0}), 3.0, "tensor"),
        (Cost(1, 1, {"bf16": 1000.0, "fp32": 100.0}), 3.0, "tensor"),
        (Cost(1, 1, vector_flops=200.0), 4.0, "vector"),
        (Cost(1, 1, sfu_ops=50.0), 5.0, "sfu"),
        (Cost(1, 1, launches=3), 1.5, "launch"),
    ]:
        least = bound(cost, CEILINGS)
        assert (least.seconds, least.limiter) == (seconds, limiter)
        assert least.fraction(2 * seconds) == 0.5


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("nvidia  b200", "b200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_name_that_a_driver_prints_is_known_and_never_guessed(reported: str, name: str | None) -> None:
    assert identify(reported) == (name and DEVICES[name])

"""Lists GPUs by name, with the figures of their data sheets.

Matrix rates are **dense**. Data sheets print the rate with 2:4 sparsity in larger type (1,979 bf16 TFLOP/s for an H100
SXM). Memory sizes are in GB of 1e9 bytes. Link rates are for one direction, half of the data sheet's figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rooflab.roofline.model import Ceilings

SFU_OPS_PER_CLOCK_PER_SM = 16
"""The number of special functions (exp2, log2, rsqrt, reciprocal) per clock and SM, on compute capability 8.0 to 10.0
(CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions")."""
REGISTERS_PER_SM = 65_536
"""The number of 32-bit registers of an SM, on every card here (CUDA C++ Programming Guide, "Compute Capabilities")."""


@dataclass(frozen=True)
class Device:
    """One GPU model: rates per second, sizes in bytes, clocks in Hz."""

    name: str
    full_name: str
    architecture: str
    compute_capability: tuple[int, int]
    matrix_flops_per_s: Mapping[str, float]
    """Dense matrix FLOP/s by operand dtype, with fp32 accumulation (int32 for int8). `fp32` is missing, because tensor
    cores have no fp32 product; `tf32` is another dtype."""
    vector_flops_per_s: float
    """fp32 FLOP/s outside the tensor cores; a fused multiply-add counts as two."""
    hbm_bytes_per_s: float
    hbm_bytes: float
    hbm_kind: str
    l2_bytes: int
    smem_bytes_per_sm: int
    sms: int
    boost_clock_hz: float
    """The clock, in Hz, at which the matrix rates are stated."""
    max_clock_hz: float
    """The highest clock of the card, in Hz; Hopper's vector rate is stated at this clock."""
    pcie_bytes_per_s: float
    """Bytes per second over PCIe in one direction."""
    source: Mapping[str, str]
    """The title of the source, for each group of figures."""
    nvlink_bytes_per_s: float = 0.0
    """Bytes per second over all NVLink links of one GPU together, in one direction; 0 without NVLink."""
    nvlink_gpus: int = 1
    """The number of GPUs that NVLink joins at `nvlink_bytes_per_s`: 2 with a bridge, 8 on a board with switches."""
    registers_per_sm: int = REGISTERS_PER_SM
    launch_floor_s: float = 0.0
    """The least time of one empty launch, in seconds; 0 if no figure is published, so that launches set no bound."""

    @property
    def sfu_ops_per_s(self) -> float:
        """Returns the special-function operations (exp, rsqrt, ...) per second at the boost clock."""
        return SFU_OPS_PER_CLOCK_PER_SM * self.sms * self.boost_clock_hz

    def matrix_flops_per_clock_per_sm(self, dtype: str) -> float:
        """Returns the FLOPs of one SM's tensor cores per clock. Raises `ValueError` if they cannot multiply `dtype`."""
        if dtype not in self.matrix_flops_per_s:
            raise ValueError(
                f"dtype: expected one of {', '.join(self.matrix_flops_per_s)} ({self.name}), got {dtype!r}"
            )
        return self.matrix_flops_per_s[dtype] / (self.sms * self.boost_clock_hz)

    def ceilings(self, clock_hz: float | None = None) -> Ceilings:
        """Returns the peak rates of the data sheet. With `clock_hz`, returns the peak rates at this clock; the memory
        rate is unchanged.

        `fp32` (IEEE) matrix products run at the vector rate. Raises `ValueError` on a clock above `max_clock_hz`.
        """
        clock_ratio = 1.0
        vector_flops_per_s = self.vector_flops_per_s
        if clock_hz is not None:
            if not 0 < clock_hz <= self.max_clock_hz:
                raise ValueError(f"clock_hz: expected 0 < clock_hz <= {self.max_clock_hz:g}, got {clock_hz:g}")
            clock_ratio = clock_hz / self.boost_clock_hz
            vector_flops_per_s = clock_hz * self._vector_flops_per_clock
        matrix_rates = {dtype: rate * clock_ratio for dtype, rate in self.matrix_flops_per_s.items()}
        l2_bytes_per_clk = _L2_READ_BYTES_PER_CLOCK.get(self.compute_capability)
        return Ceilings(
            device=self.name,
            kind="datasheet" if clock_hz is None else "at_clock",
            hbm_bytes_per_s=self.hbm_bytes_per_s,
            tensor_flops_per_s=matrix_rates | {"fp32": vector_flops_per_s},
            vector_flops_per_s=vector_flops_per_s,
            sfu_ops_per_s=self.sfu_ops_per_s * clock_ratio,
            launch_floor_s=self.launch_floor_s,
            l2_bytes_per_s=None if l2_bytes_per_clk is None else l2_bytes_per_clk * self.boost_clock_hz * clock_ratio,
        )

    @property
    def _vector_flops_per_clock(self) -> float:
        lanes_per_sm = 64 if self.compute_capability == (8, 0) else 128
        return 2.0 * lanes_per_sm * self.sms


class _Chip(NamedTuple):
    sm: int
    sms: int
    tf32: float
    half: float
    """Dense TFLOP/s of bf16 and fp16 products."""
    fp8: float | None
    int8: float
    vector: float
    boost: float
    max: float


class _Board(NamedTuple):
    gigabytes: float
    kind: str
    terabytes_per_s: float
    l2_mib: int
    pcie: float
    nvlink: float
    nvlink_gpus: int


# fmt: off
_CHIP_SPECS = {
    # sm, SMs | dense TFLOP/s: tf32, bf16, fp8, int8 | fp32 vector TFLOP/s | boost, maximum GHz
    "h100-sxm":    _Chip( 90, 132,  494.7,  989.4, 1978.9, 1978.9, 66.9, 1.830, 1.980),
    "h100-pcie":   _Chip( 90, 114,  378.2,  756.4, 1512.9, 1512.9, 51.2, 1.620, 1.755),
    "h100-nvl":    _Chip( 90, 132,  417.5,  835.5, 1670.5, 1670.5, 60.0, 1.545, 1.785),
    "h200":        _Chip( 90, 132,  494.7,  989.4, 1978.9, 1978.9, 66.9, 1.830, 1.980),
    "gh200":       _Chip( 90, 132,  494.7,  989.4, 1978.9, 1978.9, 66.9, 1.830, 1.980),
    "gh200-144gb": _Chip( 90, 132,  494.7,  989.4, 1978.9, 1978.9, 66.9, 1.830, 1.980),
    "a100-40gb":   _Chip( 80, 108,  156.0,  312.0,   None,  624.0, 19.5, 1.410, 1.410),
    "a100-80gb":   _Chip( 80, 108,  156.0,  312.0,   None,  624.0, 19.5, 1.410, 1.410),
    "l4":          _Chip( 89,  58,   60.0,  121.0,  242.5,  242.5, 30.3, 2.040, 2.040),
    "l40s":        _Chip( 89, 142,  183.0,  362.05, 733.0,  733.0, 91.6, 2.490, 2.520),
    # With fp32 accumulation: on a GeForce card half of the rate with fp16 accumulation (330.3 and 660.6).
    "rtx-4090":    _Chip( 89, 128,   82.6,  165.2,  330.3,  660.6, 82.6, 2.520, 3.105),
    "b200":        _Chip(100, 148, 1125.0, 2250.0, 4500.0, 4500.0, 75.0, 1.856, 1.980),
}
_BOARDS = {
    # memory: GB, kind, TB/s | L2 MiB | one direction: PCIe GB/s, NVLink GB/s, GPUs that NVLink joins
    "h100-sxm":    _Board( 80, "HBM3",   3.350,  50, 64, 450,   8),
    "h100-pcie":   _Board( 80, "HBM2e",  2.000,  50, 64, 300,   2),
    "h100-nvl":    _Board( 94, "HBM3",   3.900,  60, 64, 300,   2),
    "h200":        _Board(141, "HBM3e",  4.800,  60, 64, 450,   8),
    "gh200":       _Board( 96, "HBM3",   4.000,  60, 64, 450, 256),
    "gh200-144gb": _Board(144, "HBM3e",  4.900,  60, 64, 450, 256),
    "a100-40gb":   _Board( 40, "HBM2",   1.555,  40, 32, 300,   8),
    "a100-80gb":   _Board( 80, "HBM2e",  2.039,  40, 32, 300,   8),
    "l4":          _Board( 24, "GDDR6",  0.300,  48, 32,   0,   1),
    "l40s":        _Board( 48, "GDDR6",  0.864,  96, 32,   0,   1),
    "rtx-4090":    _Board( 24, "GDDR6X", 1.008,  72, 32,   0,   1),
    "b200":        _Board(180, "HBM3e",  8.000, 126, 64, 900,   8),
}
# fmt: on

_PRODUCT_NAMES = {
    "h100-sxm": "NVIDIA H100 SXM5 80 GB",
    "h100-pcie": "NVIDIA H100 PCIe 80 GB",
    "h100-nvl": "NVIDIA H100 NVL 94 GB",
    "h200": "NVIDIA H200 SXM 141 GB",
    "gh200": "NVIDIA GH200 Grace Hopper 96 GB",
    "gh200-144gb": "NVIDIA GH200 Grace Hopper 144 GB",
    "a100-40gb": "NVIDIA A100 SXM4 40 GB",
    "a100-80gb": "NVIDIA A100 SXM4 80 GB",
    "l4": "NVIDIA L4 24 GB",
    "l40s": "NVIDIA L40S 48 GB",
    "rtx-4090": "NVIDIA GeForce RTX 4090 24 GB",
    "b200": "NVIDIA B200 180 GB",
}

_H100_WHITEPAPER = "NVIDIA H100 Tensor Core GPU Architecture (whitepaper)"
_H100_DATASHEET = "NVIDIA H100 Tensor Core GPU Datasheet"
_A100_WHITEPAPER = "NVIDIA A100 Tensor Core GPU Architecture (whitepaper)"
_A100_DATASHEET = "NVIDIA A100 Tensor Core GPU Datasheet"
_ADA_PAPER = "NVIDIA Ada GPU Architecture (whitepaper)"
_GH200_DATASHEET = "NVIDIA GH200 Grace Hopper Superchip Datasheet"
_RUNTIME_SOURCE = "as the CUDA runtime and NVML report it"
_SPEC_SOURCES = {  # peak rates; memory and links; clocks; L2
    "h100-sxm": (_H100_WHITEPAPER, _H100_DATASHEET, _H100_WHITEPAPER, _H100_WHITEPAPER),
    "h100-pcie": (_H100_WHITEPAPER, "NVIDIA H100 PCIe GPU Product Brief", _H100_WHITEPAPER, _H100_WHITEPAPER),
    "h100-nvl": (
        f"{_H100_DATASHEET}; sparse rates halved",
        _H100_DATASHEET,
        "NVIDIA H100 NVL GPU Product Brief; boost from the bf16 rate at 4,096 FLOP per clock and SM",
        _RUNTIME_SOURCE,
    ),
    "h200": ("NVIDIA H200 Tensor Core GPU Datasheet; sparse rates halved",) * 2 + (_H100_WHITEPAPER, _RUNTIME_SOURCE),
    "gh200": (_GH200_DATASHEET, _GH200_DATASHEET, _H100_WHITEPAPER, _RUNTIME_SOURCE),
    "gh200-144gb": (_GH200_DATASHEET, _GH200_DATASHEET, _H100_WHITEPAPER, _RUNTIME_SOURCE),
    "a100-40gb": (_A100_WHITEPAPER, _A100_DATASHEET, _A100_WHITEPAPER, _A100_WHITEPAPER),
    "a100-80gb": (_A100_WHITEPAPER, _A100_DATASHEET, _A100_WHITEPAPER, _A100_WHITEPAPER),
    "l4": ("NVIDIA L4 Tensor Core GPU Datasheet; sparse rates halved",) * 2 + ("NVIDIA L4 Product Brief", _ADA_PAPER),
    "l40s": ("NVIDIA L40S Datasheet",) * 2
    + ("NVIDIA L40S Product Brief; boost from the bf16 rate at 1,024 FLOP per clock and SM", _ADA_PAPER),
    "rtx-4090": (_ADA_PAPER, _ADA_PAPER, f"{_ADA_PAPER}; maximum {_RUNTIME_SOURCE}", _ADA_PAPER),
    "b200": (
        "NVIDIA HGX B200 specifications, a board's over its 8 GPUs; sparse rates halved",
        "NVIDIA DGX B200 Datasheet, a system's over its 8 GPUs",
        "boost from the bf16 rate at 8,192, maximum from the vector rate at 256 FLOP per clock and SM",
        _RUNTIME_SOURCE,
    ),
}
_FAMILY_NAMES = {80: "Ampere", 89: "Ada Lovelace", 90: "Hopper", 100: "Blackwell"}
_SMEM_KIB_PER_SM = {80: 164, 89: 100, 90: 228, 100: 228}
_MIN_LAUNCH_S = {90: 1.3e-6}  # a CUDA graph on an H100 ("Look Ma, No Bubbles!", Hazy Research, 2025)
_L2_READ_BYTES_PER_CLOCK = {(8, 0): 5120.0}  # the A100 whitepaper; no figure is published for Ada, Hopper and Blackwell


def _tera(value: float) -> float:
    return float(round(value * 1e12))  # 2.039 * 1e12 is not 2.039e12


def _device(name: str) -> Device:
    chip, card, (rates_source, memory_source, clocks_source, l2) = _CHIP_SPECS[name], _BOARDS[name], _SPEC_SOURCES[name]
    matrix_tflops = {"bf16": chip.half, "fp16": chip.half, "tf32": chip.tf32, "int8": chip.int8}
    if chip.fp8 is not None:
        matrix_tflops["fp8_e4m3"] = chip.fp8
    return Device(
        name=name,
        full_name=_PRODUCT_NAMES[name],
        architecture=_FAMILY_NAMES[chip.sm],
        compute_capability=divmod(chip.sm, 10),
        matrix_flops_per_s={dtype: _tera(rate) for dtype, rate in matrix_tflops.items()},
        vector_flops_per_s=_tera(chip.vector),
        hbm_bytes_per_s=_tera(card.terabytes_per_s),
        hbm_bytes=card.gigabytes * 1e9,
        hbm_kind=card.kind,
        l2_bytes=card.l2_mib * 2**20,
        smem_bytes_per_sm=_SMEM_KIB_PER_SM[chip.sm] * 2**10,
        sms=chip.sms,
        boost_clock_hz=chip.boost * 1e9,
        max_clock_hz=chip.max * 1e9,
        pcie_bytes_per_s=card.pcie * 1e9,
        nvlink_bytes_per_s=card.nvlink * 1e9,
        nvlink_gpus=card.nvlink_gpus,
        launch_floor_s=_MIN_LAUNCH_S.get(chip.sm, 0.0),
        source={
            "peak rates": rates_source,
            "memory, links": memory_source,
            "clocks": clocks_source,
            "L2": l2,
            "shared memory, registers, special functions": "CUDA C++ Programming Guide",
        },
    )


DEVICES: Mapping[str, Device] = {name: _device(name) for name in _CHIP_SPECS}
"""All devices by name."""

_ALIASES = {"h100": "h100-sxm", "h200-sxm": "h200", "gh200-96gb": "gh200", "a100": "a100-80gb", "rtx4090": "rtx-4090"}
# Names as torch.cuda and NVML print them. A name must match as a whole: a MIG slice, a laptop part, an H20 or an
# "H100 64GB" is another card, although its name begins with a name here.
_REPORTED_NAMES = {
    "nvidia h100 80gb hbm3": "h100-sxm",
    "nvidia h100 pcie": "h100-pcie",
    "nvidia h100 nvl": "h100-nvl",
    "nvidia h200": "h200",
    "nvidia gh200 480gb": "gh200",
    "nvidia gh200 144g hbm3e": "gh200-144gb",
    "nvidia a100-sxm4-40gb": "a100-40gb",
    "nvidia a100-sxm4-80gb": "a100-80gb",
    "nvidia l4": "l4",
    "nvidia l40s": "l40s",
    "nvidia geforce rtx 4090": "rtx-4090",
    "nvidia b200": "b200",
}


def resolve(name: str) -> tuple[Device, str | None]:
    """Finds the device `name`. The name may be in upper or lower case, or be the name that nvidia-smi prints. Also
    returns a note if several devices match."""
    if reported_device := identify(name):
        return reported_device, None
    device_key = "-".join(name.lower().replace("_", "-").split())
    device_name = _ALIASES.get(device_key, device_key)
    if device_name not in DEVICES:
        raise ValueError(f"gpu: expected one of {', '.join(DEVICES)}, got {name!r}")
    device = DEVICES[device_name]
    sibling_names = [sibling for sibling in DEVICES if sibling.startswith(f"{device_key}-") and sibling != device_name]
    if not sibling_names:
        return device, None
    return device, f"{name} is taken as {device_name} ({device.full_name}); there are also {', '.join(sibling_names)}"


def get_device(name: str) -> Device:
    """Returns the device called `name`, found as in `resolve`; `h100` means `h100-sxm`. Raises `ValueError`, with a
    list of the known devices, if no device matches."""
    return resolve(name)[0]


def identify(reported_name: str) -> Device | None:
    """Returns the device that torch.cuda or NVML calls `reported_name`, or the device with this `full_name`. Returns
    None if no name matches exactly."""
    name = " ".join(reported_name.lower().split())
    if name in _REPORTED_NAMES:
        return DEVICES[_REPORTED_NAMES[name]]
    return next((device for device in DEVICES.values() if device.full_name.lower() == name), None)

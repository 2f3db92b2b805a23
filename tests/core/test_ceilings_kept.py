"""A GPU's measured ceilings are stored, used while they are valid, and shown beside the data sheet's."""

import itertools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from test_ceilings_cuda import CUDA, GPU, ON_H200, hopper, reading  # noqa: F401

from rooflab.bench import show
from rooflab.bench.core import call as calls
from rooflab.bench.core import ceilings, record_files
from rooflab.bench.core.ceilings import MachineLimits, ceilings_for, cpu_limits, raise_ceilings
from rooflab.roofline.device import get_device

H200 = get_device("h200")
CLOCKS = {"power_w": [300.0, 500.0], "throttled": []}
READINGS = (
    reading("hbm_read", 4.2e12, l2_state="cold", seconds=(2e-3, 2e-3), clocks=CLOCKS),
    reading("hbm_read", 0.0, status="INCORRECT", reason="wrong sum", seconds=()),
    reading("l2_read", 6e12),
    reading("fma", 60e12, clock_hz=1.83e9),
    reading("ex2", 3.5e12, clock_hz=1.98e9 * 1.001),
    reading("bf16 wgmma shared", 700e12, dtype="bf16", clock_hz=1.5e9),
    reading("launch graph", seconds=(1.4e-6, 1.2e-6)),
)
OK = [found for found in READINGS if found.status == "OK"]


def scaled(records, factor, **fields):
    """The records of a card that is faster by this factor."""

    def by(value):
        return value and value * factor

    return [replace(r, bytes_per_s=by(r.bytes_per_s), flops_per_s=by(r.flops_per_s), **fields) for r in records]


@pytest.fixture
def card(monkeypatch, tmp_path, hopper):  # noqa: F811
    """A machine with an H200, on which nothing is measured yet; what is in `readings`, or raised as `error`, is then
    measured, each time 10% faster than before."""

    found = SimpleNamespace(readings=OK, error=None, budgets=[], folder=tmp_path / "cache" / "ceilings")
    run_ids = map(str, itertools.count())

    def measure(device, environment, budget_s):
        if found.error is not None:
            raise found.error
        found.budgets.append(budget_s)
        return scaled(found.readings, 1 + 0.1 * (len(found.budgets) - 1), run_id=next(run_ids))

    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU.name)
    monkeypatch.setattr(ceilings, "measure_cuda", measure)
    found.be = lambda **gpu: monkeypatch.setattr(
        ceilings, "this_machine", lambda index: replace(ON_H200, gpu=replace(GPU, **gpu))
    )
    found.be()
    return found


def keep(card, readings):
    """Measures these."""
    card.readings, card.budgets = readings, []
    return MachineLimits.measured(CUDA)


def test_another_driver_or_clock_limit_is_another_card(card):
    keep(card, READINGS)
    for field, value in {"driver": "590.2", "max_sm_clock_mhz": 1755, "power_limit_w": 600.0, "mig": True}.items():
        card.be(**{field: value})
        why = f"they were measured with {field} {getattr(GPU, field)}, and it is {value}"
        assert MachineLimits.kept(CUDA) == ([], why)
    card.be(uuid="GPU-2")
    assert MachineLimits.kept(CUDA) == ([], "none were measured on this device")


def test_bounds_use_what_was_measured_and_else_the_data_sheet(card):
    assert ceilings_for(CUDA) == H200.ceilings() and not card.budgets, "asking for a bound measures nothing"
    MachineLimits.measured(CUDA)
    found = ceilings_for(CUDA)
    assert found.kind == "measured" and found.hbm_bytes_per_s == pytest.approx(4.2e12) and found.device == "h200"
    limits = ceilings.limits_for(CUDA, found)
    assert limits.hbm_bytes_per_s == H200.hbm_bytes_per_s, "a measured rate is no physical limit"
    assert limits.l2_bytes_per_s == found.l2_bytes_per_s, "but that of L2, where no data sheet has one"
    card.be(driver="590.2")
    assert ceilings_for(CUDA).kind == "datasheet"


def test_rows_stand_beside_the_data_sheet_and_the_clock_held():
    rows = {row["limit"]: row for row in MachineLimits(READINGS).rows}
    hbm, l2, fma, ex2, bf16, launch = (
        rows[name] for name in ("hbm_read", "l2_read", "fma", "ex2", "bf16 wgmma shared", "launch graph")
    )
    assert (hbm["measured"], hbm["datasheet"], hbm["at_clock"], hbm["unit"]) == (pytest.approx(4.2), 4.8, None, "TB/s")
    assert hbm["status"] == "OK" and hbm["reached"] == "88%", "of the data sheet, where no clock scales it"
    assert l2["datasheet"] is None and l2["reached"] is None
    # 132 SMs of 128 lanes at 1.83 GHz, two FLOPs each; the data sheet's rate is at 1.98 GHz.
    assert fma["at_clock"] == pytest.approx(2 * 128 * 132 * 1.83e9 / 1e12) and fma["datasheet"] == pytest.approx(66.9)
    assert ex2["at_clock"] == pytest.approx(16 * 132 * 1.98e9 / 1e12), "the timer's step makes no clock higher"
    assert bf16["at_clock"] == pytest.approx(989.4 * 1.5 / 1.83) and bf16["reached"] == "86%"
    assert bf16["clock_ghz"] == 1.5 and bf16["how"] == "threads=256"
    assert (launch["measured"], launch["datasheet"], launch["unit"]) == (pytest.approx(1.2), pytest.approx(1.3), "us")
    unknown = ON_H200.to_dict() | {"gpu": asdict(replace(GPU, name="NVIDIA H20"))}
    rows = MachineLimits([replace(record, environment=unknown) for record in READINGS]).rows
    assert len(rows) == 6 and all(row["datasheet"] is None and row["at_clock"] is None for row in rows)


@pytest.fixture
def command(rooflab, monkeypatch):
    monkeypatch.setattr(show.out, "width", 200)
    return lambda *words: rooflab("ceilings", *words)


def test_the_command_shows_a_gpu_and_writes_its_records(command, card, tmp_path):
    status, out, err = command("--out", tmp_path / "out")
    assert status == 0 and "measuring: none were measured on this device" in err
    assert "bounds use the measured ceilings" in out and "driver 580.1" in out
    assert all(limit in out for limit in ("hbm_read", "bf16 wgmma shared", "launch graph"))
    (file,) = (tmp_path / "out").iterdir()
    assert len(record_files.read(file)) == len(READINGS) - 1
    status, out, err = command("--json", "--budget", "7")
    shown = json.loads(out)
    assert status == 0 and shown["used"] == "measured" and len(card.budgets) == 1 and "measuring" not in err
    assert "budget: not spent, because what was measured before still counts" in err
    assert shown["rows"] == json.loads(json.dumps(MachineLimits(OK).rows))
    assert len(shown["readings"]) == len(READINGS) - 1 and shown["environment"]["gpu"]["driver"] == "580.1"
    assert "not spent" not in command("--refresh", "--budget", "7")[2]
    assert card.budgets == [60.0, 7.0]


@pytest.mark.parametrize("bad, code", [("INCORRECT", 11), ("COMPILE_ERROR", 11), ("INVALID", 0)])
def test_a_wrong_microkernel_is_no_success(command, card, bad, code):
    """INVALID in one launch shape is none of the limit's where another shape was read; else it is status 13."""
    failed = replace(READINGS[1], status=bad, reason="why")
    keep(card, [*READINGS[2:], READINGS[0], failed])
    assert command()[0] == code
    (file,) = card.folder.iterdir()
    file.unlink()
    keep(card, [failed, *READINGS[2:]])
    status, out, _ = command()
    assert status == (code or 13) and "bounds use the datasheet ceilings: no measured ceilings without HBM" in out


def test_the_command_on_a_cpu(command, monkeypatch, tmp_path):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_limits, "GEMM_SIZES", (64,))
    monkeypatch.setattr(cpu_limits, "last_level_cache_bytes", lambda: 2**20)
    status, out, _ = command("--device", "cpu", "--budget", "0.2", "--json", "--out", tmp_path / "out")
    shown = json.loads(out)
    found = shown["ceilings"]
    assert status == 0 and shown["used"] == found["kind"] == "measured" and found["sfu_ops_per_s"] is None
    assert found["hbm_bytes_per_s"] == max(found["access_bytes_per_s"].values())
    assert found["vector_flops_per_s"] == found["tensor_flops_per_s"]["fp32"]
    limits = ["memory read", "memory write", "memory copy", "memory triad", "fp32 matrix", "fp16 matrix", "bf16 matrix"]
    records = record_files.read(tmp_path / "out")
    assert [row["limit"] for row in shown["rows"]] == [record.kernel for record in records] == [*limits, "fp32 vector"]
    assert all((record.bytes_per_s or record.flops_per_s) > 0 and record.device == "cpu" for record in records)
    assert command("--budget", "0")[::2] == (2, "rooflab: --budget: expected seconds above 0, got 0.0\n")


@pytest.mark.gpu
def test_on_a_gpu_every_microkernel_is_right_and_below_the_data_sheet(monkeypatch, tmp_path):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path))
    records, reason = MachineLimits.measured(CUDA, budget_s=20.0)
    assert {r.status for r in records} == {"OK"}, [(r.kernel, r.reason) for r in records if r.reason]
    assert reason == "" and 0 < ceilings_for(CUDA).launch_floor_s < 1e-4
    rows = {row["limit"]: row for row in MachineLimits(records).rows}
    if torch.cuda.get_device_name() == GPU.name:
        for limit in ("hbm_read", "hbm_copy", "fma", "ex2", "bf16 wgmma shared"):
            assert int(rows[limit]["reached"].rstrip("%")) >= 80, rows[limit]
        assert rows["l2_read"]["measured"] > rows["hbm_read"]["measured"]


def test_a_measurement_that_fails_costs_neither_the_run_nor_the_ceilings(card, caplog):
    MachineLimits.measured(CUDA)
    known = ceilings_for(CUDA)
    card.readings = [reading(found.kernel, dtype=found.scheme, status="INVALID") for found in OK]
    assert raise_ceilings(known, CUDA) == known == ceilings_for(CUDA)
    assert "measuring again failed (no measured ceilings without HBM, fma" in caplog.text
    card.error = ValueError("cupy: expected the package")
    assert raise_ceilings(known, CUDA) == known == ceilings_for(CUDA)
    assert "cupy: expected the package" in caplog.text


def test_memory_that_torch_holds_for_nobody_is_free(monkeypatch):
    for name, value in {"mem_get_info": (10, 100), "memory_reserved": 70, "memory_allocated": 20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert calls.free_bytes(CUDA) == 60.0

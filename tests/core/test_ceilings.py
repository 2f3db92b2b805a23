import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rooflab.bench.core import ceilings as module
from rooflab.bench.core import record_files
from rooflab.bench.core.ceilings import MachineLimits, assemble, ceilings_for, cpu_limits, limits_for, raise_ceilings
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.noise import Samples, why_invalid
from rooflab.bench.core.record import Record
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Ceilings, Cost

SLOW = Ceilings("cpu", "measured", 10e9, {"fp32": 1e9, "bf16": 4e9}, 1e9)
CPU = torch.device("cpu")


def cpu_records(memory, fp32=1e9, bf16=4e9, noise="", run_id="r"):
    """The records of a CPU with these rates."""
    fields = {
        "kind": "ceiling",
        "run_id": run_id,
        "device": "cpu",
        "status": "NOISY" if noise else "OK",
        "reason": noise,
    }
    fields |= Environment.now().record_fields()
    rates = {"fp32 matrix": ("fp32", fp32), "bf16 matrix": ("bf16", bf16), "fp32 vector": ("fp32", fp32)}
    found = [Record(kernel=limit, scheme=dtype, flops_per_s=rate, **fields) for limit, (dtype, rate) in rates.items()]
    return [Record(kernel="memory copy", bytes_per_s=memory, **fields), *found]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Counts the measurements, each twice as fast as the one before; what is in `noise` makes them NOISY."""

    found = SimpleNamespace(calls=0, noise="", folder=tmp_path / "cache" / "ceilings")

    def measure(environment, budget_s):
        found.calls += 1
        return cpu_records(2.0**found.calls * 1e9, noise=found.noise, run_id=str(found.calls))

    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "measure_cpu", measure)
    return found


def test_ceilings_are_measured_once_and_kept(measured):
    first = ceilings_for(CPU)
    assert ceilings_for(CPU) == first and measured.calls == 1 and first.kind == "measured"
    assert first.device == Environment.now().cpu
    (file,) = measured.folder.iterdir()
    records = record_files.read(file)
    assert file.stem == Environment.now().machine_key and records == MachineLimits.kept(CPU)[0]
    assert [record.kernel for record in records] == ["memory copy", "fp32 matrix", "bf16 matrix", "fp32 vector"]
    assert {record.ceilings["hbm_bytes_per_s"] for record in records} == {2e9}
    MachineLimits.measured(CPU)
    assert ceilings_for(CPU).hbm_bytes_per_s == 4e9 and measured.calls == 2


def test_what_a_busy_machine_measured_is_noisy_and_not_kept(measured, monkeypatch, caplog, tmp_path):
    measured.noise = "other processes were running"
    first = ceilings_for(CPU)
    assert first.noise == measured.noise and f"NOISY: {first.noise}" in caplog.text
    assert ceilings_for(CPU) == first and measured.calls == 1, "it counts for this process"
    assert not measured.folder.exists() and {row["status"] for row in MachineLimits.kept(CPU).rows} == {"NOISY"}
    measured.noise = ""
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "later"))  # as in a later process
    assert ceilings_for(CPU).hbm_bytes_per_s == 4e9 and measured.calls == 2
    measured.noise = "other processes were running"
    assert MachineLimits.measured(CPU)[0][0].bytes_per_s == 8e9
    assert ceilings_for(CPU).hbm_bytes_per_s == 8e9 and not ceilings_for(CPU).noise, "noise only lowers a rate"


def test_16_bit_operands_may_be_multiplied_in_fp32(monkeypatch):
    rates = {torch.float32: 3e9, torch.float16: 1e9, torch.bfloat16: 7e9}
    monkeypatch.setattr(cpu_limits, "measure_gemm", lambda dtype, budget_s: rates[dtype])
    monkeypatch.setattr(cpu_limits, "measure_bandwidth", lambda budget_s: {"read": 1e9})
    found, _ = assemble(cpu_limits.measure_cpu(Environment.now(), 5.0), CPU)
    assert found.tensor_flops_per_s == {"fp32": 3e9, "fp16": 3e9, "bf16": 7e9} and found.vector_flops_per_s == 3e9
    monkeypatch.setattr(cpu_limits, "why_noisy", lambda seconds, waiting: "busy")
    records = cpu_limits.measure_cpu(Environment.now(), 5.0)
    assert {(record.status, record.reason) for record in records} == {("NOISY", "busy")}


OLDER = '{"environment": {"threads": 2}, "ceilings": {"hbm_bytes_per_s": 1e9}}'


@pytest.mark.parametrize("text", ["", "{", "{}\n", "[]\n", OLDER, OLDER + "\n"])
def test_a_damaged_file_is_measured_anew(measured, text):
    ceilings_for(CPU)
    (file,) = measured.folder.iterdir()
    file.write_text(text)
    assert MachineLimits.kept(CPU) == ([], "what is kept is damaged or of another version")
    assert ceilings_for(CPU).hbm_bytes_per_s == 4e9
    assert record_files.read(file)[0].bytes_per_s == 4e9


def test_a_measurement_on_a_busy_machine_lowers_no_ceiling(measured, monkeypatch):
    known = ceilings_for(CPU)
    monkeypatch.setattr(module, "measure_cpu", lambda environment, budget_s: cpu_records(1e9, fp32=5e9, bf16=1e9))
    raised = raise_ceilings(known, CPU)
    assert raised.hbm_bytes_per_s == 2e9
    assert raised.tensor_flops_per_s == {"fp32": 5e9, "bf16": 4e9, "fp8_e4m3": 5e9, "tf32": 5e9}
    assert raised.vector_flops_per_s == 5e9 and ceilings_for(CPU) == raised


def test_bandwidth_counts_every_array_that_a_call_moves(monkeypatch):
    monkeypatch.setattr(cpu_limits, "last_level_cache_bytes", lambda: 2**20)
    seconds = itertools.count(0.0)
    monkeypatch.setattr(cpu_limits, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    array = 4 * 2**20
    assert cpu_limits.measure_bandwidth(1.0) == {"read": array, "write": array, "copy": 2 * array, "triad": 3 * array}


def test_a_gpu_has_its_data_sheet_and_no_reading_passes_its_highest_clock(monkeypatch):
    device, l2 = torch.device("cuda"), replace(SLOW, l2_bytes_per_s=6e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = ceilings_for(device)
    assert found == get_device("h200").ceilings() and found.kind == "datasheet"
    limits = limits_for(device, found)
    assert limits.matrix_rate("bf16") == pytest.approx(found.matrix_rate("bf16") * 1.98 / 1.83)
    assert limits_for(CPU, SLOW) is SLOW
    assert limits_for(CPU, replace(SLOW, noise="busy")) is None
    # What a method reads of a launch is no limit of the card: the data sheet's floor is a graph's; CUPTI reads less.
    assert found.launch_floor_s == 1.3e-6 and limits.launch_floor_s == 0.0
    cost = Cost(4096, 4096, launches=1)
    assert why_invalid(Samples((0.9e-6,), "cuda cupti", "cold", launch_floor_s=0.8e-6), cost, limits) is None
    # The measured rate of L2 bounds what no data sheet does.
    assert limits_for(device, l2).l2_bytes_per_s == 6e12 and limits_for(device, SLOW).l2_bytes_per_s is None
    reason = why_invalid(Samples((1e-6,), "cuda events", "warm"), Cost(6e6, 6e6), limits_for(device, l2))
    assert reason.startswith("2.00 times the L2 ceiling")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert limits_for(device, l2).l2_bytes_per_s == pytest.approx(7.2192e12), "the data sheet has one"

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from rooflab.bench.core.ceilings import ceilings as module
from rooflab.bench.core.ceilings import cpu
from rooflab.bench.core.ceilings.ceilings import ceilings_for, cpu_ceilings, limits_for, raise_cpu_ceilings
from rooflab.bench.core.ceilings.readings import cpu_records, cpu_rows, larger
from rooflab.bench.core.environment import snapshot
from rooflab.bench.core.noise import Samples, above_limits, why_invalid
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Ceilings, Cost

SLOW = Ceilings("cpu", "measured", 10e9, {"fp32": 1e9, "bf16": 4e9}, 1e9)


@pytest.fixture
def measured(monkeypatch):
    """Counts the measurements, each twice as fast as the one before."""
    calls = []

    def measure(name, budget_s=5.0):
        calls.append(name)
        return replace(SLOW, hbm_bytes_per_s=2.0 ** len(calls) * 1e9)

    monkeypatch.setattr(module, "measure_cpu", measure)
    return calls


def test_ceilings_are_measured_once_and_kept(tmp_path, measured):
    first = cpu_ceilings(folder=tmp_path)
    assert cpu_ceilings(folder=tmp_path) == first and len(measured) == 1
    assert measured == [snapshot().cpu]
    file = tmp_path / "ceilings" / f"{snapshot().machine_key}.json"
    assert json.loads(file.read_text())["environment"]["torch"] == torch.__version__
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no temporary file is left"
    assert cpu_ceilings(refresh=True, folder=tmp_path).hbm_bytes_per_s == 4e9
    assert cpu_ceilings(folder=tmp_path).hbm_bytes_per_s == 4e9


def test_what_a_busy_machine_measured_is_noisy_and_not_kept(tmp_path, measured, monkeypatch, caplog):
    monkeypatch.setattr(module, "noise", lambda seconds, waiting: "other processes were running")
    monkeypatch.setattr(module, "_noisy", {})
    first = cpu_ceilings(folder=tmp_path)
    assert first.noise == "other processes were running" and f"NOISY: {first.noise}" in caplog.text
    assert cpu_ceilings(folder=tmp_path) == first and len(measured) == 1, "it counts for this process"
    assert not list(tmp_path.iterdir())
    assert {row["status"] for row in cpu_rows(first)} == {"NOISY"}
    assert {made.reason for made in cpu_records(first, snapshot().to_dict(), "r")} == {first.noise}
    monkeypatch.setattr(module, "noise", lambda seconds, waiting: "")
    assert larger(first, SLOW).noise == larger(SLOW, first).noise == ""
    monkeypatch.setattr(module, "_noisy", {})
    assert cpu_ceilings(folder=tmp_path).hbm_bytes_per_s == 4e9 and len(measured) == 2
    assert cpu_ceilings(folder=tmp_path).hbm_bytes_per_s == 4e9 and len(measured) == 2


def test_16_bit_operands_may_be_multiplied_in_fp32(monkeypatch):
    rates = {torch.float32: 3e9, torch.float16: 1e9, torch.bfloat16: 7e9}
    monkeypatch.setattr(cpu, "measure_gemm", lambda dtype, budget_s: rates[dtype])
    monkeypatch.setattr(cpu, "measure_bandwidth", lambda budget_s: {"read": 1e9})
    assert cpu.measure_cpu("x").tensor_flops_per_s == {"fp32": 3e9, "fp16": 3e9, "bf16": 7e9}


@pytest.mark.parametrize("field", ["threads", "torch"])
def test_ceilings_of_other_threads_or_versions_are_not_ours(tmp_path, measured, field):
    cpu_ceilings(folder=tmp_path)
    (file,) = (tmp_path / "ceilings").iterdir()
    kept = json.loads(file.read_text())
    kept["environment"][field] = "another"
    file.write_text(json.dumps(kept))
    cpu_ceilings(folder=tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize("text", ["", "{", "{}", '{"environment": {}, "ceilings": {}}', "[]"])
def test_a_damaged_file_is_measured_anew(tmp_path, measured, text):
    cpu_ceilings(folder=tmp_path)
    (file,) = (tmp_path / "ceilings").iterdir()
    file.write_text(text)
    assert cpu_ceilings(folder=tmp_path).hbm_bytes_per_s == 4e9
    assert json.loads(file.read_text())["ceilings"]["hbm_bytes_per_s"] == 4e9


def test_the_cache_folder_comes_from_the_environment(tmp_path, measured, monkeypatch):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "there"))
    assert ceilings_for(torch.device("cpu")).kind == "measured"
    assert (tmp_path / "there" / "ceilings").is_dir()


def test_a_measurement_on_a_busy_machine_lowers_no_ceiling(tmp_path, measured):
    known = replace(SLOW, hbm_bytes_per_s=1e9, tensor_flops_per_s={"fp32": 5e9, "bf16": 1e9}, vector_flops_per_s=5e9)
    raised = raise_cpu_ceilings(known, folder=tmp_path)
    assert raised.hbm_bytes_per_s == 2e9
    assert raised.tensor_flops_per_s == {"fp32": 5e9, "bf16": 4e9} and raised.vector_flops_per_s == 5e9
    assert cpu_ceilings(folder=tmp_path) == raised


def test_bandwidth_counts_every_array_that_a_call_moves(monkeypatch):
    monkeypatch.setattr(cpu, "last_level_cache_bytes", lambda: 2**20)
    monkeypatch.setattr(cpu, "_fastest_s", lambda run, budget_s: run() is None or 1.0)
    array = 4 * 2**20
    assert cpu.measure_bandwidth(1.0) == {"read": array, "write": array, "copy": 2 * array, "triad": 3 * array}


def test_a_form_with_no_fast_path_is_found_out_at_the_smallest_size(monkeypatch):
    """1 GFLOP/s in one form, 100 in another: the slow one's largest product alone would take 17 s."""
    tried = []

    def products(dtype, size):
        for form, rate in (("slow", 1e9), ("fast", 1e11)):
            yield form, lambda form=form, rate=rate: tried.append((form, size)) or 2 * size**3 / rate

    monkeypatch.setattr(cpu, "_products", products)
    monkeypatch.setattr(cpu, "_fastest_s", lambda run, budget_s: run())
    assert cpu.measure_gemm(torch.float32, 60.0) == pytest.approx(1e11)
    # The first form has nothing to be compared with at the first size, and is given up at the second.
    assert max(size for form, size in tried if form == "slow") <= 256
    assert max(size for form, size in tried if form == "fast") == max(cpu.GEMM_SIZES)


def test_the_forms_compute_the_same_product(monkeypatch):
    forms = dict(cpu._products(torch.float32, 32))
    assert forms["nt"]().shape == forms["nn"]().shape == (32, 32)
    if "packed" in forms:
        torch.testing.assert_close(forms["packed"](), dict(cpu._products(torch.float32, 32))["nt"]())


def test_a_gpu_has_its_data_sheet_and_no_reading_passes_its_highest_clock(monkeypatch):
    device, l2 = torch.device("cuda"), replace(SLOW, l2_bytes_per_s=6e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = ceilings_for(device)
    assert found == get_device("h200").ceilings() and found.kind == "datasheet"
    limits = limits_for(device, found)
    assert limits.matrix_rate("bf16") == pytest.approx(found.matrix_rate("bf16") * 1.98 / 1.83)
    assert limits_for(torch.device("cpu"), SLOW) is SLOW
    assert limits_for(torch.device("cpu"), replace(SLOW, noise="busy")) is None
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


def test_a_gpu_that_is_in_no_table_has_no_ceilings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H20")
    device = torch.device("cuda")
    assert ceilings_for(device) is None
    assert limits_for(device, SLOW) is None, "a measured rate is no physical limit"
    limits = limits_for(device, replace(SLOW, l2_bytes_per_s=6e12))
    above = partial(above_limits, Samples((1e-6,), "cuda events", "cold"))
    assert above(Cost(5e6, 0, {"bf16": 1e15}, 1e15), limits) is None
    assert above(Cost(12e6, 0), limits)[0] == "L2"

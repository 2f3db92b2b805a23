"""A GPU's measured ceilings: kept, used where they still hold, shown beside the data sheet."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from test_ceilings_cuda import World, measure

from rooflab.bench import show
from rooflab.bench.core import call as calls
from rooflab.bench.core import record_files
from rooflab.bench.core.ceilings import ceilings, cpu
from rooflab.bench.core.ceilings import cuda as ceilings_cuda
from rooflab.bench.core.ceilings.ceilings import (
    ceilings_for,
    cuda_ceilings,
    file_of,
    find,
    keep,
    kept_ceilings,
    raise_cuda_ceilings,
)
from rooflab.bench.core.ceilings.microkernels.microkernel import MicrokernelGroup
from rooflab.bench.core.ceilings.readings import MicrokernelReading, assemble, better, card_records, card_rows
from rooflab.bench.core.environment import Gpu, snapshot
from rooflab.roofline.device import get_device

GPU = Gpu("NVIDIA H200", "GPU-1", 141 * 10**9, 132, 60 * 2**20, "580.1", 1980, 3201, 700.0, True, False)
CUDA = torch.device("cuda")
H200 = get_device("h200")


def reading(limit, unit, rate, **fields):
    fields = {"status": "OK", "work": rate * 2e-3, "seconds": (2e-3, 2e-3), "timer": "cuda events"} | fields
    return MicrokernelReading(limit, unit, {"threads": 256}, **fields)


READINGS = (
    reading("hbm_read", "byte", 4.2e12, l2_state="cold", clocks={"power_w": [300.0, 500.0], "throttled": []}),
    reading("hbm_read", "byte", 0.0, status="INCORRECT", reason="wrong sum", seconds=()),
    reading("l2_read", "byte", 6e12),
    reading("fma", "flop", 60e12, clock_hz=1.83e9),
    reading("ex2", "op", 3.5e12, clock_hz=1.98e9 * 1.001),
    reading("bf16 wgmma shared", "flop", 700e12, dtype="bf16", clock_hz=1.5e9),
    reading("launch graph", "launch", 0.0, seconds=(1.4e-6, 1.2e-6)),
)


@pytest.fixture
def environment():
    return replace(snapshot(), gpu=GPU, machine_key="nvidia-h200-16c-00000000")


@pytest.fixture
def card(monkeypatch, tmp_path, environment):
    """A machine with an H200, on which nothing is measured yet; gives the list of measurements."""
    calls = []

    def measure(device, **options):
        calls.append(options)
        factor = 1 + 0.1 * (len(calls) - 1)
        return [replace(r, work=r.work * factor) for r in READINGS if r.status == "OK"]

    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU.name)
    monkeypatch.setattr(ceilings, "_environment", lambda index: environment)
    monkeypatch.setattr(ceilings_cuda, "measure_cuda", measure)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return calls


def test_what_is_kept_comes_back_whole(tmp_path, environment):
    found, reason = assemble(READINGS, "h200", 90)
    kept = keep(environment, READINGS, found, reason, tmp_path)
    again, why = find(environment, tmp_path)
    assert again == kept and why == "" and again.readings == READINGS and again.ceilings == found
    assert [path.name for path in (tmp_path / "ceilings").iterdir()] == [file_of(environment, tmp_path).name]


def test_another_driver_or_clock_limit_is_another_card(tmp_path, environment):
    keep(environment, READINGS, None, "x", tmp_path)
    for field, value in {"driver": "590.2", "max_sm_clock_mhz": 1755, "power_limit_w": 600.0, "mig": True}.items():
        found, why = find(replace(environment, gpu=replace(GPU, **{field: value})), tmp_path)
        assert found is None and why == f"they were measured with {field} {getattr(GPU, field)}, and it is {value}"


def test_two_cards_of_one_machine_do_not_share(tmp_path, environment):
    keep(environment, READINGS, None, "x", tmp_path)
    other = replace(environment, gpu=replace(GPU, uuid="GPU-2"))
    assert find(other, tmp_path) == (None, "none were measured on this card")
    keep(other, READINGS[:1], None, "y", tmp_path)
    assert find(environment, tmp_path)[0].reason == "x" and find(other, tmp_path)[0].reason == "y"


def test_other_microkernels_measured_something_else(tmp_path, environment, monkeypatch):
    keep(environment, READINGS, None, "x", tmp_path)
    folder = tmp_path / "microkernels"
    folder.mkdir()
    (folder / "memory.cu").write_text("// changed")
    monkeypatch.setattr(ceilings, "HERE", folder)
    assert find(environment, tmp_path) == (None, "they were measured by other microkernels")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ceilings": null}'])
def test_a_damaged_file_counts_for_nothing(tmp_path, environment, text):
    keep(environment, READINGS, None, "x", tmp_path)
    file_of(environment, tmp_path).write_text(text)
    assert find(environment, tmp_path) == (None, "what is kept is damaged or of another version")


def test_without_a_gpu_there_are_none(tmp_path, environment):
    assert find(replace(environment, gpu=None), tmp_path) == (None, "there is no GPU")
    with pytest.raises(ValueError, match="^environment: expected one with a GPU"):
        keep(replace(environment, gpu=None), READINGS, None, "x", tmp_path)


def test_bounds_use_what_was_measured_and_else_the_data_sheet(card, environment, monkeypatch):
    assert ceilings_for(CUDA) == H200.ceilings() and not card, "asking for a bound measures nothing"
    cuda_ceilings(CUDA)
    found = ceilings_for(CUDA)
    assert found.kind == "measured" and found.hbm_bytes_per_s == pytest.approx(4.2e12) and found.device == "h200"
    assert card[0]["limits"] == H200.ceilings(H200.max_clock_hz) and card[0]["uuid"] == "GPU-1"
    limits = ceilings.limits_for(CUDA, found)
    assert limits.hbm_bytes_per_s == H200.hbm_bytes_per_s, "a measured rate is no physical limit"
    assert limits.l2_bytes_per_s == found.l2_bytes_per_s, "but that of L2, where no data sheet has one"
    updated = replace(environment, gpu=replace(GPU, driver="590.2"))
    monkeypatch.setattr(ceilings, "_environment", lambda index: updated)
    assert ceilings_for(CUDA).kind == "datasheet"


def test_rows_stand_beside_the_data_sheet_and_the_clock_held():
    rows = {row["limit"]: row for row in card_rows(READINGS, H200)}
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
    assert all(row["datasheet"] is None and row["at_clock"] is None for row in card_rows(READINGS, None))


def test_every_reading_is_a_record(tmp_path, environment):
    found, _ = assemble(READINGS, "h200", 90)
    records = card_records(READINGS, found, environment.to_dict(), "run")
    record_files.write(tmp_path / "run.jsonl", *records)
    records = record_files.read(tmp_path / "run.jsonl")
    assert [record.kernel for record in records] == [r.limit for r in READINGS]
    assert {(record.kind, record.status) for record in records} == {("ceiling", "OK"), ("ceiling", "INCORRECT")}
    hbm, wrong, _, _, ex2, bf16, launch = records
    assert hbm.bytes_per_s == pytest.approx(4.2e12) and hbm.samples_s == [2e-3, 2e-3] and hbm.basis == "measured"
    assert hbm.clocks["power_w"] == [300.0, 500.0] and hbm.ceilings == json.loads(json.dumps(asdict(found)))
    assert wrong.latency_median_ms is None and wrong.reason == "wrong sum" and wrong.samples is None
    assert bf16.flops_per_s == pytest.approx(700e12) and bf16.scheme == "bf16" and bf16.metrics["sm_clock_hz"] == 1.5e9
    assert ex2.metrics["ops_per_s"] == pytest.approx(3.5e12) and launch.metrics["launch_floor_s"] == 1.2e-6


@pytest.fixture
def command(rooflab, monkeypatch):
    monkeypatch.setattr(show.out, "width", 200)
    return lambda *words: rooflab("ceilings", *words)


def test_the_command_shows_a_gpu_and_writes_its_records(command, card, tmp_path):
    status, out, err = command("--out", tmp_path / "out")
    assert status == 0 and "measuring: none were measured on this card" in err
    assert "bounds use the measured ceilings" in out and "driver 580.1" in out
    assert all(limit in out for limit in ("hbm_read", "bf16 wgmma shared", "launch graph"))
    (file,) = (tmp_path / "out").iterdir()
    assert len(record_files.read(file)) == len(READINGS) - 1
    status, out, err = command("--json", "--budget", "7")
    shown = json.loads(out)
    assert status == 0 and shown["used"] == "measured" and len(card) == 1 and "measuring" not in err
    assert "budget: not spent, because what was measured before still counts" in err
    assert shown["rows"] == json.loads(json.dumps(card_rows([r for r in READINGS if r.status == "OK"], H200)))
    assert len(shown["readings"]) == len(READINGS) - 1 and shown["environment"]["gpu"]["driver"] == "580.1"
    assert "not spent" not in command("--refresh", "--budget", "7")[2]
    assert len(card) == 2 and card[1]["budget_s"] == 7.0


@pytest.mark.parametrize("bad, code", [("INCORRECT", 11), ("COMPILE_ERROR", 11), ("INVALID", 0)])
def test_a_wrong_microkernel_is_no_success(command, card, environment, bad, code):
    """INVALID in one launch shape is none of the limit's where another shape was read; else it is status 13."""
    failed = replace(READINGS[1], status=bad, reason="why")
    found, reason = assemble(READINGS, "h200", 90)
    keep(environment, [*READINGS[2:], READINGS[0], failed], found, reason)
    assert command()[0] == code
    found, reason = assemble([failed, *READINGS[2:]], "h200", 90)
    keep(environment, [failed, *READINGS[2:]], found, reason)
    status, out, _ = command()
    assert status == (code or 13) and "bounds use the datasheet ceilings: no measured ceilings without HBM" in out


def test_the_command_on_a_cpu(command, monkeypatch, tmp_path):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu, "GEMM_SIZES", (64,))
    monkeypatch.setattr(cpu, "last_level_cache_bytes", lambda: 2**20)
    status, out, _ = command("--device", "cpu", "--budget", "0.2", "--json", "--out", tmp_path / "out")
    shown = json.loads(out)
    assert status == 0 and shown["used"] == "measured" and shown["ceilings"]["kind"] == "measured"
    found = shown["ceilings"]
    assert found["hbm_bytes_per_s"] == max(found["access_bytes_per_s"].values())
    assert found["vector_flops_per_s"] == found["tensor_flops_per_s"]["fp32"] and found["sfu_ops_per_s"] is None
    limits = ["memory read", "memory write", "memory copy", "memory triad", "fp32 matrix", "fp16 matrix", "bf16 matrix"]
    assert [row["limit"] for row in shown["rows"]] == [*limits, "fp32 vector"]
    records = record_files.read(tmp_path / "out")
    assert [record.kernel for record in records] == [*limits, "fp32 vector"]
    assert all((record.bytes_per_s or record.flops_per_s) > 0 and record.device == "cpu" for record in records)
    status, out, err = command("--device", "cpu")
    assert status == 0 and "memory triad" in out and "bounds use the measured ceilings" in out and "budget" not in err
    assert "budget: not spent" in command("--device", "cpu", "--budget", "9")[2]
    assert command("--budget", "0")[::2] == (2, "rooflab: --budget: expected seconds above 0, got 0.0\n")


@pytest.mark.gpu
def test_on_a_gpu_every_microkernel_is_right_and_below_the_data_sheet(monkeypatch, tmp_path):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path))
    kept = cuda_ceilings(CUDA, refresh=True, budget_s=20.0)
    assert {r.status for r in kept.readings} == {"OK"}, [(r.limit, r.reason) for r in kept.readings if r.reason]
    assert kept.ceilings is not None and 0 < kept.ceilings.launch_floor_s < 1e-4
    rows = {row["limit"]: row for row in card_rows(kept.readings, H200)}
    if torch.cuda.get_device_name() == GPU.name:
        for limit in ("hbm_read", "hbm_copy", "fma", "ex2", "bf16 wgmma shared", "bf16 wgmma registers"):
            assert int(rows[limit]["reached"].rstrip("%")) >= 80, rows[limit]
        assert rows["l2_read"]["measured"] > rows["hbm_read"]["measured"]


OK = [found for found in READINGS if found.status == "OK"]


@pytest.fixture
def again(card, monkeypatch):
    """Ceilings that are kept; what is set as `readings`, or raised as `error`, is measured from then on."""

    class Again:
        readings = OK
        error = None

    def measure(device, **options):
        if Again.error is not None:
            raise Again.error
        return Again.readings

    cuda_ceilings(CUDA)
    monkeypatch.setattr(ceilings_cuda, "measure_cuda", measure)
    return Again


def test_a_measurement_that_fails_costs_neither_the_run_nor_the_ceilings(again, caplog):
    known = ceilings_for(CUDA)
    again.readings = [replace(found, status="INVALID", reason="throttled") for found in OK]
    assert raise_cuda_ceilings(known, CUDA) == known == ceilings_for(CUDA)
    assert "measuring again failed (no measured ceilings without HBM, fma" in caplog.text
    again.error = ValueError("cupy: expected the package")
    assert raise_cuda_ceilings(known, CUDA) == known == ceilings_for(CUDA)
    assert "cupy: expected the package" in caplog.text


def test_a_refresh_that_makes_no_ceilings_is_shown_and_keeps_those_there_were(again):
    known = ceilings_for(CUDA)
    again.readings = [found for found in OK if found.limit != "fma"]
    shown = cuda_ceilings(CUDA, refresh=True)
    assert shown.ceilings is None and shown.reason.startswith("no measured ceilings without fma; those of 20")
    assert kept_ceilings(CUDA)[0].ceilings == known == ceilings_for(CUDA)


def test_what_is_shown_makes_what_is_used(again):
    """The table is drawn from the readings, and a measurement may be better in one limit and worse in another."""
    again.readings = [replace(found, work=(1.1 if found.limit == "fma" else 0.8) * found.work) for found in OK]
    raised = raise_cuda_ceilings(ceilings_for(CUDA), CUDA)
    kept, _ = kept_ceilings(CUDA)
    assert assemble(kept.readings, "h200", 90)[0] == kept.ceilings == raised == ceilings_for(CUDA)
    assert raised.vector_flops_per_s == pytest.approx(66e12) and raised.hbm_bytes_per_s == pytest.approx(4.2e12)


def test_of_each_limit_the_better_measurement_stays_whole():
    first = [reading("fma", "flop", 50e12), reading("fma", "flop", 60e12), reading("launch cupti", "launch", 0.0)]
    second = [reading("fma", "flop", 55e12), reading("launch cupti", "launch", 0.0, seconds=(1e-3, 2e-3))]
    assert better(first, second) == [*first[:2], second[1]] == better(second, first)
    failed = replace(second[0], status="INVALID")
    assert better(first, [failed]) == first and better([], [failed]) == [failed]


def test_clocks_that_were_set_while_measuring_are_said(again, command, environment):
    assert "clocks set by the user" not in command()[1]
    held = [replace(found, clocks={"throttle_reasons": 0x2 | 0x4}) for found in OK]
    keep(environment, held, *assemble(held, "h200", 90))
    assert kept_ceilings(CUDA)[0].clocks_were_set and "clocks set by the user" in command()[1]


@pytest.mark.parametrize("where", ["probe", "clock"])
def test_an_error_that_the_device_reports_late_is_a_reading(monkeypatch, where):
    """CUDA reports what a launch did wrong to whoever waits for the device next."""
    lost = RuntimeError("CUDA error: an illegal memory access was encountered\nadvice")
    world = World()

    def clock_hz():
        raise lost

    def time(functions, **options):
        if where == "probe" and "probe" in functions:
            raise lost
        return World.time(world, functions, **options)

    world.time = time
    broken = world.kernel("fma", **({"clock_hz": clock_hz} if where == "clock" else {}))
    hbm = world.kernel("hbm_read", fixed_repeats=2)  # asks for no probe
    first, second = measure(world, monkeypatch, MicrokernelGroup("fma", [broken]), MicrokernelGroup("hbm_read", [hbm]))
    assert (first.status, first.reason) == ("RUNTIME_ERROR", "CUDA error: an illegal memory access was encountered")
    assert second.status == "OK", "the others are asked all the same"


def test_memory_that_torch_holds_for_nobody_is_free(monkeypatch):
    for name, value in {"mem_get_info": (10, 100), "memory_reserved": 70, "memory_allocated": 20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert calls.free_bytes(CUDA) == 60.0

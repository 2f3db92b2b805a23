"""What a bar answers, from records: met, missed, or unmeasured and why."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
from tiny_model import with_graphs as add_graphs
from tiny_model import write_config

from rooflab.bench.records.files import RunWriter
from rooflab.bench.records.record import Record
from rooflab.bench.suite import again, measures, state, worst
from rooflab.bench.suite.bars import attention, engine, gemm, lab
from rooflab.bench.suite.entries import Context, Outcome
from rooflab.bench.suite.measures import against_library, of_bandwidth, ratios, usable
from rooflab.kernels import registry
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device

CASES = ["M=16,N=64,K=64,layout=NT,bias=false", "M=32,N=64,K=64,layout=NT,bias=false"]
MEASURED = {"kind": "measured", "hbm_bytes_per_s": 4e12}


def record(kernel, case, latency_ms, role="optimized", **changes):
    fields = {
        "kind": "bench", "run_id": "r", "status": "OK", "environment": {}, "op": "gemm", "kernel": kernel,
        "role": role, "backend": "triton", "case_id": case, "scheme": "bf16", "device": "cuda", "checked_by": "gpu",
        "basis": "measured", "latency_median_ms": latency_ms, "least_bytes": 4e6, "ceilings": MEASURED,
        "bound_fraction": 0.5,
    }  # fmt: skip
    return Record(**{**fields, **changes})


def failed(kernel, case, role="optimized"):
    return record(kernel, case, None, role, status="INCORRECT", reason="c: wrong", basis="bound")


@pytest.fixture
def answer(monkeypatch, tmp_path):
    """`answer(bar, records, arguments, dry_run)`: what a bar says of these records."""

    def run(function, records, dry_run=False, **arguments):
        for module in (measures, gemm, attention):
            monkeypatch.setattr(module, "measure", lambda *args, **options: (records, "r", False))
        return function(Context("bar:x", tmp_path, "cuda", dry_run, 10.0), **arguments)

    return run


def times(library, **rungs):
    found = [record("library", case, ms, "library") for case, ms in zip(CASES, library, strict=True)]
    return found + [record(name, case, ms) for name, own in rungs.items() for case, ms in zip(CASES, own, strict=True)]


def test_the_best_rung_is_held_against_the_library(answer):
    given = times((1.0, 1.0), slow=(2.0, 2.0), good=(0.8, 1.1))
    found = answer(against_library, given, op="gemm", cases=CASES, geomean=1.0, worst=0.9)
    assert found.bar == "MET" and found.figures["kernel"] == "good" and found.files == ("r.jsonl",)
    assert found.figures["geomean"] == pytest.approx(math.sqrt(1 / 0.8 / 1.1))
    assert found.needed.startswith("geomean >= 1")
    assert found.figures["worst"] == pytest.approx(1 / 1.1) and found.figures["worst case"] == CASES[1]
    assert answer(against_library, given, op="gemm", cases=CASES, geomean=1.0, worst=0.93).bar == "MISSED"
    assert answer(against_library, given, op="gemm", cases=CASES, geomean=1.1).bar == "MISSED"
    assert answer(against_library, given, op="gemm", cases=CASES, geomean=1.0, dry_run=True).bar == "UNMEASURED"


def test_each_bucket_of_rows_is_served_by_the_rung_that_is_best_there(answer):
    """16 rows and 32 are different buckets of a decode step; a rung that takes only one of them may serve it."""
    given = [*times((1.0, 1.0), wide=(2.0, 0.5)), record("narrow", CASES[0], 0.8)]
    found = answer(against_library, given, op="gemm", cases=CASES, geomean=1.0, worst=1.2)
    assert found.bar == "MET" and found.figures["kernel"] == "narrow in decode:16, wide in decode:64"
    assert found.figures["geomean"] == pytest.approx(math.sqrt(1 / 0.8 / 0.5))
    assert found.figures["of bound at best"] == 0.5
    only = [*times((1.0, 1.0)), record("narrow", CASES[0], 0.8)]
    assert answer(against_library, only, op="gemm", cases=CASES, geomean=1.0).bar == "UNMEASURED"


@pytest.mark.parametrize(
    ("card", "latency_ms", "bar"),
    [("NVIDIA H100 80GB HBM3", 0.0189, "MET"), ("NVIDIA H100 80GB HBM3", 0.0191, "MISSED"),
     ("NVIDIA H200", 0.0141, "MISSED"), ("NVIDIA A100", 0.001, "UNMEASURED")],
)  # fmt: skip
def test_a_time_is_held_against_the_limit_of_its_card(answer, card, latency_ms, bar):
    given = [
        record("good", CASES[0], latency_ms, environment={"gpu": {"name": card}}),
        record("library", CASES[0], 1e-3, "library", environment={"gpu": {"name": card}}),
    ]
    limits = {"H100": 19.0, "H200": 14.0}
    found = answer(gemm.within, given, op="gemm", case=CASES[0], scheme="bf16", limits_us=limits)
    assert found.bar == bar and found.figures["time_us"] == pytest.approx(latency_ms * 1e3)
    found = answer(gemm.within, [failed("good", CASES[0])], op="gemm", case=CASES[0], scheme="bf16",
                   limits_us=limits)  # fmt: skip
    assert found.bar == "UNMEASURED" and found.figures == {}


@pytest.mark.parametrize(("off", "bar"), [(0.0, "MET"), (2.0**-7, "MISSED"), (math.nan, "MISSED")])
def test_the_error_of_sums_is_held_against_that_of_fp32_ones(off, bar, monkeypatch, tmp_path):
    """Naive's sums, each off by a share of what it is: 2**-7 is four times the most that bf16 rounds away."""
    naive = registry.get_kernel("gemm_fp8", "naive")
    fine = dataclasses.replace(naive, name="fine", role="optimized")
    rung = dataclasses.replace(fine, name="rung", fn=lambda a, b, a_scale, b_scale, bias=None, *, fast_accum=False:
                               naive.fn(a, b, a_scale, b_scale, bias) * (1 + off))  # fmt: skip
    monkeypatch.setattr(measures, "usable", lambda context, op: [naive, fine, rung])
    case = "M=32,N=48,K=512,scales=tensor,bias=false"
    asked = {"op": "gemm_fp8", "case": case, "scheme": "fp8_e4m3", "most": 2.0}
    context = Context("bar:x", tmp_path, "cpu", False, 10.0)
    found = gemm.accumulated(context, **asked)
    assert found.bar == bar and found.status == "DONE" and not (tmp_path / "running.json").exists()
    assert found.figures["fine: largest error over fp32's"] == 1.0
    assert gemm.accumulated(dataclasses.replace(context, dry_run=True), **asked).bar == "UNMEASURED"
    monkeypatch.setattr(measures, "usable", lambda context, op: [naive, registry.get_kernel("gemm_fp8", "promoted_ws")])
    found = gemm.accumulated(context, **asked)
    assert found.bar == "UNMEASURED" and "gemm_fp8/promoted_ws: UNSUPPORTED: needs a CUDA device" in found.reason


def test_a_rung_that_is_wrong_or_was_not_timed_on_every_case_answers_nothing(answer):
    library = times((1.0, 1.0))
    found = answer(against_library, [*library, record("good", CASES[0], 0.1)], op="gemm", cases=CASES, geomean=1.0)
    assert found.bar == "UNMEASURED" and found.figures == {}
    wrong = [*library, failed("good", CASES[0]), record("good", CASES[1], 0.1)]
    found = answer(against_library, wrong, op="gemm", cases=CASES, geomean=1.0)
    assert found.bar == "UNMEASURED" and "gemm/good: INCORRECT: c: wrong" in found.reason
    no_library = [failed("library", case, "library") for case in CASES] + [record("good", case, 1.0) for case in CASES]
    assert answer(against_library, no_library, op="gemm", cases=CASES, geomean=1.0).bar == "UNMEASURED"
    assert ratios(no_library, CASES) == []


def test_the_library_is_torchs_best_backend_at_each_case_and_not_another_projects_kernel(answer):
    given = times((1.0, 1.0), good=(0.5, 0.5))
    given += [record("sdpa", case, ms, "peer", backend="torch") for case, ms in zip(CASES, (2.0, 0.25), strict=True)]
    given += [record("theirs", case, 0.1, "peer", backend="cuda") for case in CASES]
    (ratio,) = ratios(given, CASES)
    assert ratio.by_case == {CASES[0]: 2.0, CASES[1]: 0.5}
    (ratio,) = ratios([*times((1.0, 1.0), good=(0.5, 0.5)), failed("sdpa", CASES[0], "peer")], CASES)
    assert ratio.by_case == {CASES[0]: 2.0, CASES[1]: 2.0}, "one that refused is not there"


def test_the_skinny_bar_wants_more_where_the_library_is_slow(answer):
    """4 MB in 1 ms are 0.1% of 4 TB/s; in 1 us all of it."""
    options = {"op": "gemm", "cases": CASES, "geomean": 1.0, "slow_geomean": 1.05, "slow_share": 0.9}
    slow = times((1.0, 1e-3), good=(0.9, 1e-3))
    found = answer(gemm.skinny, slow, **options)
    assert found.bar == "MET" and found.figures["cases where the library is slow"] == 1
    assert found.figures["geomean there"] == pytest.approx(1 / 0.9)
    assert answer(gemm.skinny, times((1.0, 1e-3), good=(0.98, 1e-3)), **options).bar == "MISSED"
    fast = times((1e-3, 1e-3), good=(1e-3, 1e-3))
    assert answer(gemm.skinny, fast, **options).bar == "MET", "at the library's speed where that is the memory's"
    datasheet = [record("library", case, 1.0, "library", ceilings={**MEASURED, "kind": "datasheet"}) for case in CASES]
    found = answer(gemm.skinny, datasheet + [record("good", case, 0.5) for case in CASES], **options)
    assert found.bar == "UNMEASURED" and found.reason == "no bandwidth was measured on this card"


def test_a_share_of_bandwidth_is_of_the_measured_one(answer):
    least = {CASES[0]: 0.9, CASES[1]: 0.5}
    given = [record("good", CASES[0], 1.05e-3), record("good", CASES[1], 1.6e-3)]
    found = answer(of_bandwidth, given, op="gemm", least=least)
    assert found.bar == "MET" and found.figures[f"share at {CASES[0]}"] == pytest.approx(1 / 1.05)
    late = [record("good", CASES[0], 1.2e-3), record("good", CASES[1], 1.6e-3)]
    assert answer(of_bandwidth, late, op="gemm", least=least).bar == "MISSED"
    assert answer(of_bandwidth, given[:1], op="gemm", least=least).bar == "UNMEASURED"
    sheet = [record("good", case, 1e-3, ceilings={**MEASURED, "kind": "datasheet"}) for case in CASES]
    found = answer(of_bandwidth, sheet, op="gemm", least=least)
    assert found.bar == "UNMEASURED" and "no bandwidth was measured on this card" in found.reason and found.figures


def test_ragged_lengths_are_held_against_even_ones(answer):
    even, ragged = attention._decode(64, 4096), attention._decode(64, 4096) + ",lognormal=true"
    given = [record("good", even, 1.0e-3), record("good", ragged, 1.02e-3)]
    options = {"op": "paged_attention", "even": even, "ragged": ragged, "least": 0.97}
    assert answer(attention.ragged_lengths, given, **options).bar == "MET"
    late = [given[0], record("good", ragged, 1.1e-3)]
    assert answer(attention.ragged_lengths, late, **options).bar == "MISSED"
    slow = [record("slow", even, 9e-3), record("slow", ragged, 9e-3)]
    found = answer(attention.ragged_lengths, [*slow, *late], **options)
    assert found.bar == "MISSED" and found.figures["kernel"] == "good", "slow on both is as slow on one as on the other"
    found = answer(attention.ragged_lengths, [*slow, *late, record("split", even, 2e-3), record("split", ragged, 1e-3)],
                   **options)  # fmt: skip
    assert found.bar == "MET" and found.figures["kernel"] == "split"
    assert found.figures["fastest with even lengths"] == "good"


@pytest.mark.parametrize(
    ("alarms", "slowed", "bar"),
    [(0, "SLOWER", "MET"), (1, "UNRESOLVED", "MET"), (2, "SLOWER", "MISSED"), (0, "SAME", "MISSED"),
     (0, "INVALID", "UNMEASURED")],
)  # fmt: skip
def test_the_bar_of_the_ab_counts_what_was_called_wrongly(alarms, slowed, bar, monkeypatch, tmp_path):
    calm = [{"verdict": "SLOWER" if number < alarms else "SAME"} for number in range(120)]
    value = {"tables": {"A against A, run 1": calm, "A against A slowed by 5%": [{"verdict": slowed}]}}
    asked = []
    monkeypatch.setattr(lab, "run_command", lambda words: asked.append(words) or (0, value, ""))
    found = lab.false_alarms(Context("bar:ab", tmp_path, "cuda", False, 2100.0), ["ab", "--out", "{out}"], 20, 1)
    assert asked == [["ab", "--out", str(tmp_path), "--repeats", "20", "--budget", "100"]], "21 rounds share its time"
    assert found.bar == bar and found.figures["false alarms"] == alarms and found.figures["comparisons"] == 120


def test_a_kernel_whose_first_check_failed_is_not_run(tmp_path):
    every = usable(Context("x", tmp_path, "cuda", False, 1.0), "gemm")
    without = Context("x", tmp_path, "cuda", False, 1.0, excluded={"gemm/tensor_core": "TIMEOUT"})
    assert {kernel.name for kernel in every} - {kernel.name for kernel in usable(without, "gemm")} == {"tensor_core"}
    only = Context("x", tmp_path, "cuda", False, 1.0, verified=("gemm/library",))
    assert [kernel.name for kernel in usable(only, "gemm")] == ["library"]


@pytest.mark.parametrize(("paged", "bar"), [((1.0, 2.0), "MET"), ((1.0, 2.2), "MISSED"), ((None, 2.0), "UNMEASURED")])
def test_paged_prefill_is_held_against_the_contiguous_kernel(monkeypatch, tmp_path, paged, bar):
    entry = next(entry for entry in attention.BARS if entry.id.endswith("paged_attention.prefill"))
    pairs = dict(entry.arguments["pairs"])

    def measured(context, op, rungs, cases, scheme):
        ms = paged if op == "paged_attention" else (1.0, 2.0)
        both = zip(cases, ms, strict=True)
        found = [record("rung", case.id, time, op=op) for case, time in both if time is not None]
        return [*found, *(record("slow", case.id, 9.0, op=op) for case in cases[1:])], op, False

    monkeypatch.setattr(attention, "measure", measured)
    found = attention.paged_prefill(Context("bar:x", tmp_path, "cuda", False, 10.0), "paged_attention", pairs, 1.05)
    assert found.bar == bar and found.needed == "paged over contiguous <= 1.05"
    if bar != "UNMEASURED":
        assert found.figures["paged over contiguous, worst"] == pytest.approx(max(paged[0], paged[1] / 2))


def test_the_engine_is_held_against_the_bytes_and_flops_that_it_needs(tmp_path, monkeypatch):
    """A small model on the CPU, its latencies replaced, beside the ceilings of a card."""
    real, seen, noise = engine.Runs.run, [], []

    def run(runs, batch, prompt, new_tokens):
        seen.append((batch, prompt, new_tokens, runs.graphs))
        result = real(runs, batch, 20, min(new_tokens, 4))
        runs.noise += noise
        changed = dataclasses.replace(result.summary, ttft_p50_ms=4.0, itl_p50_ms=2.0 if runs.graphs else 5.0)
        return dataclasses.replace(result, summary=changed)

    monkeypatch.setattr(engine.Runs, "run", run)
    monkeypatch.setattr(engine.Runs, "__init__", with_graphs(engine.Runs.__init__))
    arch = get_architecture("llama-3.1-8b")
    assert engine.read_bytes(arch) == 2 * (arch.parameters().total - arch.parameters().embedding)
    flops = engine.prompt_flops(arch, 2048)
    assert flops == pytest.approx(2 * 2048 * 6.98e9 * (31 / 32) + 2048**2 * 2 * 4096 * 32, rel=0.03)
    sizes = {"read_bytes": lambda arch: 8e9, "prompt_flops": lambda arch, prompt: 2e12}
    for name, value in sizes.items():
        monkeypatch.setattr(engine, name, value)
    ceilings = types.SimpleNamespace(kind="measured", access_bytes_per_s={"read": 4e12, "copy": 5e12})
    monkeypatch.setattr(engine, "ceilings_for", lambda device: ceilings)
    monkeypatch.setattr(engine.torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(engine, "sm_clock_under_load", lambda device: 9e9)
    path = write_config(tmp_path, max_position_embeddings=4096)
    context = Context("bar:x", tmp_path, "cpu", False, 100.0, excluded={"rope_and_cache/joined": "INCORRECT"})
    monkeypatch.setattr(engine, "FIRST_ON_CUDA", {"rope_and_cache": ("joined",)})
    found = engine.serving(context, str(path), 0.85, 0.45, [2])
    sheet = get_device("h100-sxm")
    peak = sheet.ceilings(sheet.max_clock_hz).tensor_flops_per_s["bf16"]
    assert found.figures["ITL share"] == pytest.approx(1.0)
    assert found.figures["TTFT share"] == pytest.approx(2e12 / peak / 4e-3)
    assert found.bar == "MET" and found.figures["decoded tokens/s, batch 2, graphs"] == 1000
    assert found.figures["decoded tokens/s, batch 2, eager"] == 400
    assert seen == [*[(1, 2048, 1, True)] * 5, *[(n, 128, 128, graphs) for graphs in (True, False) for n in (1, 2)]]
    assert engine.serving(context, str(path), 1.01, 0.45, [2]).bar == "MISSED"
    noise.append("other processes were running")
    assert engine.serving(context, str(path), 0.85, 0.45, [2]).bar == "UNMEASURED"
    noise.clear()
    ceilings.kind = "datasheet"
    assert engine.serving(context, str(path), 0.85, 0.45, [2]).bar == "UNMEASURED"


def with_graphs(begin):
    def begin_with_graphs(runs, context, *arguments):
        begin(runs, context, *arguments)
        assert {row["kernel"] for row in runs.llm.ops.describe() if row["op"] == "rope_and_cache"} == {"naive"}
        add_graphs(runs.llm)

    return begin_with_graphs


def test_a_missed_bar_is_judged_again_with_the_configs_that_a_search_found(tmp_path, monkeypatch):
    name, bar = "bar:gemm.x", {"op": "gemm", "cases": CASES, "geomean": 1.0, "rungs": ["tma"]}
    writer = RunWriter(tmp_path, "r")
    writer.write(*times((1.0, 1.0), tma=(1.25, 1.0)))
    progress = state.Progress(state.Identity("p", None, "t", "m"), {})
    progress.outcomes[name] = Outcome("DONE", bar="MISSED", files=(writer.path.name,))
    progress.save(tmp_path)
    asked = []

    def tune_op(op, kernels, cases, **options):
        asked.append((op, kernels, cases))
        assert options["exclude"] == ["gemm/stream_k"], "what hangs on this card does not run beside it either"
        return types.SimpleNamespace(records=[record("tma", CASES[0], 0.8), record("tma", CASES[0], 0.9)], files=("t",))

    monkeypatch.setattr(again, "tune_op", tune_op)
    context = Context("again", tmp_path, "cuda", False, 10.0, excluded={"gemm/stream_k": "TIMEOUT"})
    found = again.again(context, {name: bar})
    assert asked == [("gemm", ["tma"], CASES)], "the worst case first"
    assert found.figures == {"gemm.x": "geomean 0.894 -> 1.118, worst 0.800 -> 1.000, met"} and found.files == ("t",)
    progress.outcomes[name] = Outcome("DONE", bar="MET", files=(writer.path.name,))
    progress.save(tmp_path)
    assert again.again(context, {name: bar}).reason == "no bar against the library was missed" and len(asked) == 1


def test_what_a_first_check_has_planted_is_not_planted_again(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(measures, "measure_op", lambda *args, **options: given.append(options) or iter(()))
    kernels = [registry.get_kernel("gemm", name) for name in ("library", "tma", "pipelined")]
    context = Context("bar:x", tmp_path, "cuda", False, 10.0, verified=("gemm/library", "gemm/tma"))
    case = registry.get_op("gemm").cases["smoke"][0]
    monkeypatch.setattr(measures, "already_broken", lambda device: "")
    for scheme in ("bf16", "tf32"):
        measures.measure(context, "gemm", kernels, [case], scheme)
    assert [options["planted_before"] for options in given] == [{"tma"}, frozenset()], "in the first check's scheme"


def test_the_hardware_counts_the_best_rung_of_the_worst_bars(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path, "r")
    writer.write(*times((1.0, 1.0), tma=(1.25, 1.0), slow=(1.5, 2.0)))
    progress = state.Progress(state.Identity("p", None, "t", "m"), {})
    for number, (ratio, case) in enumerate([(0.9, CASES[1]), (0.8, CASES[0]), (0.95, CASES[0])]):
        figures = {"worst": ratio, "worst case": case}
        progress.outcomes[f"bar:{number}"] = Outcome("DONE", bar="MISSED", figures=figures, files=(writer.path.name,))
    progress.outcomes["bar:met"] = Outcome("DONE", bar="MET", figures={"worst": 0.1, "worst case": CASES[0]})
    progress.save(tmp_path)
    asked = []
    answers = iter([(0, {"counted": []}, ""), (2, None, "rooflab: ncu: ERR_NVGPUCTRPERM")])
    monkeypatch.setattr(worst, "run_command", lambda words: asked.append(words[:5]) or next(answers))
    found = worst.count_worst(Context("counted", tmp_path, "cuda", False, 10.0), [*progress.outcomes])
    assert asked == [["profile", "gemm", "tma", "--case", case] for case in CASES], "the two worst bars' best rung"
    assert found.files == ("counted-0-gemm-tma.json",) and (tmp_path / found.files[0]).is_file()
    assert found.status == "FAILED" and found.reason == "gemm/tma: rooflab: ncu: ERR_NVGPUCTRPERM"

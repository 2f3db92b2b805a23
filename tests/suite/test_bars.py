"""What a bar answers, from records: met, missed, or unmeasured and why."""

from __future__ import annotations

import dataclasses
import json
import math
import types

import pytest
import torch
from bars import again, attention, engine, gemm, lab, measures, worst
from bars.measures import against_library, of_bandwidth, ratios, usable
from tiny_model import with_graphs as add_graphs
from tiny_model import write_config

from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter, read
from rooflab.bench.core.running import ContextBroken
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.kernels import registry
from rooflab.reference.spec import Case
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device

CASES = ["M=16,N=64,K=64,layout=NT,bias=false", "M=32,N=64,K=64,layout=NT,bias=false"]
MEASURED = {"kind": "measured", "access_bytes_per_s": {"read": 4e12, "copy": 2e12}}
GOOD = [("good", None)]


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
            monkeypatch.setattr(module, "measure", lambda *args, **options: (records, False))
        return function(Context(tmp_path, "cuda", dry_run, 10.0), **arguments)

    return run


def times(library, **rungs):
    found = [record("library", case, ms, "library") for case, ms in zip(CASES, library, strict=True)]
    return found + [record(name, case, ms) for name, own in rungs.items() for case, ms in zip(CASES, own, strict=True)]


def test_the_best_rung_is_held_against_the_library(answer):
    given = times((1.0, 1.0), slow=(2.0, 2.0), good=(0.8, 1.1))
    found = answer(against_library, given, op="gemm", cases=CASES, geomean=1.0, worst=0.9, own=GOOD)
    assert found.bar == "MET" and found.figures["kernel"] == "good"
    assert found.figures["geomean"] == pytest.approx(math.sqrt(1 / 0.8 / 1.1))
    assert found.needed.startswith("geomean >= 1")
    assert found.figures["worst"] == pytest.approx(1 / 1.1) and found.figures["worst case"] == CASES[1]
    assert answer(against_library, given, op="gemm", cases=CASES, geomean=1.0, worst=0.93, own=GOOD).bar == "MISSED"
    assert answer(against_library, given, op="gemm", cases=CASES, geomean=1.1, own=GOOD).bar == "MISSED"
    assert (
        answer(against_library, given, op="gemm", cases=CASES, geomean=1.0, dry_run=True, own=GOOD).bar == "UNMEASURED"
    )


def test_a_bar_judges_what_was_chosen_before_the_times_and_shows_the_best_beside_it(answer, monkeypatch):
    """16 rows and 32 are different buckets of a decode step; a rung that takes only one of them may serve it."""
    given = [*times((1.0, 1.0), wide=(2.0, 0.5), good=(1.25, 1.0)), record("narrow", CASES[0], 0.8)]
    asked = {"op": "gemm", "cases": CASES, "geomean": 1.0}
    found = answer(against_library, given, own=[("narrow", 16), ("wide", None)], **asked)
    assert found.bar == "MET" and found.figures["kernel"] == "narrow, wide" and found.figures["of bound at best"] == 0.5
    assert found.figures["geomean"] == pytest.approx(math.sqrt(1 / 0.8 / 0.5))
    found = answer(against_library, given, own=GOOD, **asked)
    assert found.bar == "MISSED" and found.figures["geomean"] == pytest.approx(math.sqrt(1 / 1.25))
    best = f"narrow in rows:16, wide in rows:64: geomean {math.sqrt(1 / 0.8 / 0.5):.3f}, worst 1.250"
    assert found.figures["best of all rungs"] == best
    assert answer(against_library, given, own=[("narrow", None)], **asked).bar == "UNMEASURED", "not timed on both"
    monkeypatch.setattr(measures, "recorded_choice", lambda op, card, bucket: {"kernel": "wide"})
    assert answer(against_library, given, own=GOOD, **asked).figures["kernel"] == "wide", (
        "a record's choice comes first"
    )


def test_a_rival_that_was_not_timed_at_many_rows_answers_nothing(answer):
    given = times((1.0, 1.0), good=(0.5, 0.5)) + [record("fa3", CASES[1], 0.75, "peer", backend="cuda")]
    asked = {"op": "gemm", "cases": CASES, "geomean": 1.0, "own": GOOD}
    found = answer(against_library, given, rivals=["fa3"], **asked)
    assert found.bar == "MET" and found.figures["over fa3"] == "geomean 1.500 of 1 cases", "these cases have few rows"
    many = [case.replace("M=16", "M=1024") for case in CASES]
    large = [dataclasses.replace(one, case_id=many[CASES.index(one.case_id)]) for one in given]
    found = answer(against_library, large, rivals=["fa3", "cudnn"], **{**asked, "cases": many})
    assert found.bar == "UNMEASURED" and found.reason == "no time of fa3 and of cudnn at 1024 rows and more"


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
    context = Context(tmp_path, "cpu", False, 10.0)
    found = gemm.accumulated(context, **asked)
    assert found.bar == bar and found.status == "DONE"
    assert found.figures["fine: largest error over fp32's"] == 1.0
    assert gemm.accumulated(dataclasses.replace(context, dry_run=True), **asked).bar == "UNMEASURED"
    monkeypatch.setattr(measures, "usable", lambda context, op: [naive, registry.get_kernel("gemm_fp8", "promoted_ws")])
    found = gemm.accumulated(context, **asked)
    assert found.bar == "UNMEASURED" and "gemm_fp8/promoted_ws: UNSUPPORTED: needs a CUDA device" in found.reason


def test_a_rung_that_is_wrong_or_was_not_timed_on_every_case_answers_nothing(answer):
    library = times((1.0, 1.0))
    found = answer(
        against_library, [*library, record("good", CASES[0], 0.1)], op="gemm", cases=CASES, geomean=1.0, own=GOOD
    )
    assert found.bar == "UNMEASURED" and found.figures == {}
    wrong = [*library, failed("good", CASES[0]), record("good", CASES[1], 0.1)]
    found = answer(against_library, wrong, op="gemm", cases=CASES, geomean=1.0, own=GOOD)
    assert found.bar == "UNMEASURED" and "gemm/good: INCORRECT: c: wrong" in found.reason
    no_library = [failed("library", case, "library") for case in CASES] + [record("good", case, 1.0) for case in CASES]
    assert answer(against_library, no_library, op="gemm", cases=CASES, geomean=1.0, own=GOOD).bar == "UNMEASURED"
    assert ratios(no_library, CASES) == []


def test_the_library_is_torchs_best_backend_at_each_case_and_not_another_projects_kernel(answer):
    given = times((1.0, 1.0), good=(0.5, 0.5))
    given += [record("sdpa", case, ms, "peer", backend="torch") for case, ms in zip(CASES, (2.0, 0.25), strict=True)]
    given += [record("theirs", case, 0.1, "peer", backend="cuda") for case in CASES]
    (ratio,) = ratios(given, CASES)
    assert ratio.by_case == {CASES[0]: 2.0, CASES[1]: 0.5}
    assert ratio.figures["over"] == "library at 1, sdpa at 1"
    (ratio,) = ratios([*times((1.0, 1.0), good=(0.5, 0.5)), failed("sdpa", CASES[0], "peer")], CASES)
    assert ratio.by_case == {CASES[0]: 2.0, CASES[1]: 2.0}, "one that refused is not there"


def test_the_skinny_bar_wants_more_where_the_library_is_slow(answer):
    """4 MB in 1 ms are 0.1% of 4 TB/s; in 1 us all of it."""
    options = {"op": "gemm", "cases": CASES, "geomean": 1.0, "slow_geomean": 1.05, "slow_share": 0.9, "own": GOOD}
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


def test_a_share_of_bandwidth_is_of_what_that_access_reached(answer):
    asked = {"op": "gemm", "least": {CASES[0]: 0.9, CASES[1]: 0.5}, "own": "cooperative", "access": "read"}
    given = [record("cooperative", CASES[0], 1.05e-3), record("cooperative", CASES[1], 1.6e-3)]
    found = answer(of_bandwidth, given, **asked)
    assert found.bar == "MET" and found.figures[f"share at {CASES[0]}"] == pytest.approx(1 / 1.05)
    found = answer(of_bandwidth, given, **{**asked, "access": "copy"})
    assert found.figures[f"share at {CASES[0]}"] == pytest.approx(2 / 1.05)
    late = [record("cooperative", CASES[0], 1.2e-3), record("cooperative", CASES[1], 1.6e-3)]
    fast = [record("tma", case, 1.0e-3) for case in CASES]
    found = answer(of_bandwidth, [*late, *fast], **asked)
    assert found.bar == "MISSED" and found.figures["best of all rungs"] == "tma: 100.0%, 100.0%"
    assert answer(of_bandwidth, given[:1], **asked).bar == "UNMEASURED"
    assert answer(of_bandwidth, fast, **asked).bar == "UNMEASURED", "what a launcher takes was not timed"
    sheet = [record("cooperative", case, 1e-3, ceilings={**MEASURED, "kind": "datasheet"}) for case in CASES]
    found = answer(of_bandwidth, sheet, **asked)
    assert found.bar == "UNMEASURED" and "no bandwidth was measured on this card" in found.reason and found.figures
    found = answer(of_bandwidth, given, rivals=["fa3", "flex"], **asked)
    assert found.bar == "UNMEASURED" and found.reason == "none of fa3, flex was timed"
    beside = [record("fa3", CASES[0], 2.1e-3, "peer"), record("flex", CASES[0], 4e-3, "peer")]
    found = answer(of_bandwidth, [*given, *beside], rivals=["fa3", "flex"], **asked)
    assert found.bar == "MET" and found.figures[f"over fa3 at {CASES[0]}"] == pytest.approx(2.0)


def test_ragged_lengths_are_held_against_even_ones(answer):
    even = "B=64,context=4096,H=32,H_kv=8,D=128,block_size=16,ragged=false"
    ragged = f"{even},lognormal=true"
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
    found = lab.false_alarms(Context(tmp_path, "cuda", False, 2100.0), ["ab", "--out", "{out}"], 20, 1)
    assert asked == [["ab", "--out", str(tmp_path), "--repeats", "20", "--budget", "100"]], "21 rounds share its time"
    assert found.bar == bar and found.figures["false alarms"] == alarms and found.figures["comparisons"] == 120


@pytest.fixture
def excluded(tmp_path, monkeypatch):
    """Excludes kernels, as the suite does of those that broke a process."""

    def exclude(*names):
        (tmp_path / "excluded.json").write_text(json.dumps(dict.fromkeys(names, "TIMEOUT")))
        monkeypatch.setenv("ROOFLAB_EXCLUDE", str(tmp_path / "excluded.json"))

    return exclude


def test_a_kernel_that_is_excluded_is_not_run(tmp_path, excluded):
    every = usable(Context(tmp_path), "gemm")
    excluded("gemm/tensor_core")
    assert {kernel.name for kernel in every} - {kernel.name for kernel in usable(Context(tmp_path), "gemm")} == {
        "tensor_core"
    }
    why = registry.get_kernel("gemm", "tensor_core").why_not_here(torch.device("cpu"))
    assert why.status == "UNAVAILABLE" and why.reason == "excluded: TIMEOUT"


@pytest.mark.parametrize(("paged", "bar"), [((1.0, 2.0), "MET"), ((1.0, 2.2), "MISSED"), ((None, 2.0), "UNMEASURED")])
def test_paged_prefill_is_held_against_the_contiguous_kernel(monkeypatch, tmp_path, paged, bar):
    entry = next(bar for bar in attention.BARS if bar.id.endswith("paged_attention.prefill"))
    pairs = dict(entry.arguments["pairs"])

    def measured(context, op, rungs, cases, scheme):
        ms = paged if op == "paged_attention" else (1.0, 2.0)
        both = zip(cases, ms, strict=True)
        found = [record("rung", case.id, time, op=op) for case, time in both if time is not None]
        return [*found, *(record("slow", case.id, 9.0, op=op) for case in cases[1:])], False

    monkeypatch.setattr(attention, "measure", measured)
    found = attention.paged_prefill(Context(tmp_path, "cuda", False, 10.0), "paged_attention", pairs, 1.05)
    assert found.bar == bar and found.needed == "paged over contiguous <= 1.05"
    if bar != "UNMEASURED":
        assert found.figures["paged over contiguous, worst"] == pytest.approx(max(paged[0], paged[1] / 2))


@pytest.mark.more
def test_the_engine_is_held_against_the_bytes_and_flops_that_it_needs(tmp_path, monkeypatch, excluded):
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
    context = Context(tmp_path, "cpu", False, 100.0)
    excluded("rope_and_cache/joined")
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


def ran(folder, name, outcome, *records):
    """A bar's folder in a run."""
    own = state.folder_of(folder, name)
    RunWriter(own, "r").write(*records)
    state.save(folder, name, outcome)


def test_a_missed_bar_is_judged_again_with_the_configs_that_a_search_found(tmp_path, monkeypatch, excluded):
    name, bar = "bar:gemm.x", {"op": "gemm", "cases": CASES, "geomean": 1.0, "rungs": ["tma"]}
    ran(tmp_path, name, EntryOutcome(bar="MISSED"), *times((1.0, 1.0), tma=(1.25, 1.0)))
    asked = []

    def tune_op(op, kernels, cases, **options):
        asked.append((op, kernels, cases))
        assert options["exclude"] == ["gemm/stream_k"], "what hangs on this card does not run beside it either"
        return types.SimpleNamespace(records=[record("tma", CASES[0], 0.8), record("tma", CASES[0], 0.9)], files=("t",))

    monkeypatch.setattr(again, "tune_op", tune_op)
    excluded("gemm/stream_k")
    context = Context(tmp_path / "again")
    found = again.again(context, {name: bar})
    assert asked == [("gemm", ["tma"], CASES)], "the worst case first"
    assert found.figures == {"gemm.x": "geomean 0.894 -> 1.118, worst 0.800 -> 1.000, met"}
    state.save(tmp_path, name, EntryOutcome(bar="MET"))
    assert again.again(context, {name: bar}).reason == "no bar against the library was missed" and len(asked) == 1


def test_the_hardware_counts_the_best_rung_of_the_worst_bars(tmp_path, monkeypatch):
    records = times((1.0, 1.0), tma=(1.25, 1.0), slow=(1.5, 2.0))
    for number, (ratio, case) in enumerate([(0.9, CASES[1]), (0.8, CASES[0]), (0.95, CASES[0])]):
        figures = {"worst": ratio, "worst case": case}
        ran(tmp_path, f"bar:{number}", EntryOutcome(bar="MISSED", figures=figures), *records)
    ran(tmp_path, "bar:met", EntryOutcome(bar="MET", figures={"worst": 0.1, "worst case": CASES[0]}), *records)
    asked = []
    answers = iter([(0, {"counted": []}, ""), (2, None, "rooflab: ncu: ERR_NVGPUCTRPERM")])
    monkeypatch.setattr(worst, "run_command", lambda words: asked.append(words[:5]) or next(answers))
    context = Context(tmp_path / "counted")
    found = worst.count_worst(context, ["bar:0", "bar:1", "bar:2", "bar:met", "bar:never"])
    assert asked == [["profile", "gemm", "tma", "--case", case] for case in CASES], "the two worst bars' best rung"
    assert [path.name for path in context.out.iterdir()] == ["counted-0-gemm-tma.json"]
    assert found.status == "FAILED" and found.reason == "gemm/tma: rooflab: ncu: ERR_NVGPUCTRPERM"


def measured(monkeypatch, *records, broken=""):
    """A `Measurement` gives these records, and says that the context is `broken`; the kernels and cases that it is
    asked for."""
    asked = []

    class Measurement:
        def __init__(self, spec, scheme, settings, run_id, *, planted_before, **options):
            self.run_id, self.planted_before = run_id, planted_before

        def records(self, kernels, cases):
            asked.append(([kernel.name for kernel in kernels], [case.id for case in cases], self.planted_before))
            for one in records:
                yield dataclasses.replace(one, run_id=self.run_id)
            if broken:
                raise ContextBroken(broken)

    monkeypatch.setattr(measures, "Measurement", Measurement)
    return asked


def test_measuring_goes_on_with_the_cases_that_are_left(tmp_path, monkeypatch):
    kernels = [registry.get_kernel("gemm", name) for name in ("naive", "library")]
    cases = [registry.get_op("gemm").check_case(Case.parse(text)) for text in CASES]
    fault, illegal = {"status": "RUNTIME_ERROR", "basis": "bound"}, "CUDA error: an illegal memory access"
    measured(
        monkeypatch,
        *(record(name, CASES[0], 1.0) for name in ("naive", "library")),
        record("naive", CASES[1], None, reason=illegal, **fault),
        broken=illegal,
    )
    context = Context(tmp_path, "cpu", False, 60.0)
    with pytest.raises(ContextBroken, match="illegal"):
        measures.measure(context, "gemm", kernels, cases)
    (file,) = tmp_path.glob("*.jsonl")
    assert [(one.kernel, one.status) for one in read(file)[2:]] == [("naive", "RUNTIME_ERROR")]
    with file.open("a") as cut:
        cut.write('{"op": "gemm", "ker')
    asked = measured(monkeypatch, record("library", CASES[1], 1.0))
    found, left = measures.measure(context, "gemm", kernels[1:], cases)
    assert asked == [(["library"], [CASES[1]], frozenset())] and not left
    assert [one.case_id for one in found if one.kernel == "library"] == CASES and len(read(file)) == 4


def test_what_a_first_check_has_planted_is_not_planted_again(tmp_path, monkeypatch):
    asked = measured(monkeypatch)
    kernels = [registry.get_kernel("gemm", name) for name in ("library", "tma", "pipelined")]
    passed = {"bf16": {"tma"}, "tf32": set()}
    monkeypatch.setattr(measures, "passed_on_card", lambda kernels, scheme, device: passed[scheme])
    for scheme in ("bf16", "tf32"):
        measures.measure(
            Context(tmp_path / scheme), "gemm", kernels, [registry.get_op("gemm").cases["smoke"][0]], scheme
        )
    assert [planted for _, _, planted in asked] == [{"tma"}, frozenset()], "in the first check's scheme"


def test_a_bar_that_was_cut_is_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "measure", lambda *args: ([record("good", CASES[0], 1.0)], True))
    found = against_library(Context(tmp_path), "gemm", CASES, 1.0, GOOD)
    assert (found.status, found.bar) == ("PARTIAL", "UNMEASURED")

"""The outcome of a target, from records: met, missed, or unmeasured with the reason."""

from __future__ import annotations

import dataclasses
import json
import math
import types

import pytest
import torch
from targets import again, attention, gemm, lab, measures
from targets.measures import against_library, of_bandwidth, usable

from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter, read
from rooflab.bench.core.running import ContextBroken
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.kernels import registry
from rooflab.reference.spec import Case

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


def times(library, **rungs):
    """Records of both cases: the library's times, and each rung's."""
    found = [record("library", case, ms, "library") for case, ms in zip(CASES, library, strict=True)]
    return found + [record(name, case, ms) for name, own in rungs.items() for case, ms in zip(CASES, own, strict=True)]


def pages(*paged):
    """Of the pairs that have equal work, the times with pages, and without them."""
    both = zip([*PREFILL, *PREFILL.values()], (*paged, 1.0, 2.0), strict=True)
    return [*SLOW_PAGES, *(record("rung", case, ms) for case, ms in both if ms)]


def on(gpu, *records):
    return [dataclasses.replace(one, environment={"gpu": {"name": gpu}}) for one in records]


def unmeasured_ceilings(*records):
    return [dataclasses.replace(one, ceilings={**MEASURED, "kind": "datasheet"}) for one in records]


EVEN = "B=64,context=4096,H=32,H_kv=8,D=128,block_size=16,ragged=false"
RAGGED = f"{EVEN},lognormal=true"
MANY_ROWS = [case.replace("M=16", "M=1024") for case in CASES]
GEOMEAN = {"op": "gemm", "cases": CASES, "geomean": 1.0, "own": GOOD}
WITHIN = {"op": "gemm", "case": CASES[0], "scheme": "bf16", "limits_us": {"H100": 19.0, "H200": 14.0}}
SKINNY = {**GEOMEAN, "slow_geomean": 1.05, "slow_share": 0.9}  # 4 MB in 1 ms are 0.1% of 4 TB/s; in 1 us all of it
SHARE = {"op": "gemm", "least": {CASES[0]: 0.9, CASES[1]: 0.5}, "own": "cooperative", "access": "read"}
LENGTHS = {"op": "paged_attention", "even": EVEN, "ragged": RAGGED, "least": 0.97}
LIBRARY = times((1.0, 1.0))
SDPA = [record("sdpa", case, ms, "peer", backend="torch") for case, ms in zip(CASES, (2.0, 0.25), strict=True)]
THEIRS = [record("theirs", case, 0.1, "peer", backend="cuda") for case in CASES]
FA3 = record("fa3", CASES[1], 0.75, "peer", backend="cuda")
MIXED = [*times((1.0, 1.0), wide=(2.0, 0.5), good=(1.25, 1.0)), record("narrow", CASES[0], 0.8)]
COOPERATIVE = [record("cooperative", CASES[0], 1.05e-3), record("cooperative", CASES[1], 1.6e-3)]
LATE = [record("cooperative", CASES[0], 1.2e-3), COOPERATIVE[1]]
TMA = [record("tma", case, 1.0e-3) for case in CASES]
BESIDE = [record("fa3", CASES[0], 2.1e-3, "peer"), record("flex", CASES[0], 4e-3, "peer")]
STEADY = [record("good", EVEN, 1.0e-3), record("good", RAGGED, 1.02e-3)]
RAGGED_LATE = [STEADY[0], record("good", RAGGED, 1.1e-3)]
SLOW = [record("slow", EVEN, 9e-3), record("slow", RAGGED, 9e-3)]
SPLIT = [record("split", EVEN, 2e-3), record("split", RAGGED, 1e-3)]
PREFILL = dict(next(one for one in attention.TARGETS if one.id.endswith("paged_attention.prefill")).arguments["pairs"])
PAIRS = {"op": "paged_attention", "pairs": PREFILL, "most": 1.05}
SLOW_PAGES = [record("slow", [*PREFILL][1], 9.0), record("slow", [*PREFILL.values()][1], 9.0)]
NO_LIBRARY = [*(failed("library", case, "library") for case in CASES), *(record("good", case, 1.0) for case in CASES)]
BEST = f"narrow in rows:16, wide in rows:64: geomean {math.sqrt(1 / 0.8 / 0.5):.3f}, worst 1.250"
GOOD_OF_TWO = times((1.0, 1.0), slow=(2.0, 2.0), good=(0.8, 1.1))
JUDGED = {
    "the launcher's rung over the library": (
        against_library, GOOD_OF_TWO, {**GEOMEAN, "worst": 0.9}, "MET",
        {"kernel": "good", "geomean": math.sqrt(1 / 0.8 / 1.1), "worst": 1 / 1.1, "worst case": CASES[1]},
    ),
    "one case is too slow": (against_library, GOOD_OF_TWO, {**GEOMEAN, "worst": 0.93}, "MISSED", {}),
    "a dry run": (against_library, GOOD_OF_TWO, {**GEOMEAN, "dry_run": True}, "UNMEASURED", {}),
    # 16 rows and 32 are different buckets of a decode step; a rung that takes only one of them may serve it.
    "a rung for each bucket": (
        against_library, MIXED, {**GEOMEAN, "own": [("narrow", 16), ("wide", None)]}, "MET",
        {"kernel": "narrow, wide", "of bound at best": 0.5, "geomean": math.sqrt(1 / 0.8 / 0.5)},
    ),
    "another rung was faster": (
        against_library, MIXED, GEOMEAN, "MISSED", {"geomean": math.sqrt(1 / 1.25), "best of all rungs": BEST},
    ),
    "a rival at few rows": (
        against_library, [*times((1.0, 1.0), good=(0.5, 0.5)), FA3], {**GEOMEAN, "rivals": ["fa3"]}, "MET",
        {"over fa3": "geomean 1.500 of 1 cases"},
    ),
    "one case of the rung": (
        against_library, [*LIBRARY, record("good", CASES[0], 0.1)], GEOMEAN, "UNMEASURED", {},
    ),
    "a wrong rung": (
        against_library, [*LIBRARY, failed("good", CASES[0]), record("good", CASES[1], 0.1)], GEOMEAN, "UNMEASURED",
        "gemm/good: INCORRECT: c: wrong",
    ),
    "a wrong library": (against_library, NO_LIBRARY, GEOMEAN, "UNMEASURED", {}),
    "torch's best backend is the library": (
        against_library, [*times((1.0, 1.0), good=(0.5, 0.5)), *SDPA, *THEIRS], GEOMEAN, "MET",
        {"geomean": 1.0, "over": "library at 1, sdpa at 1"},
    ),
    "below an H100's limit": (
        gemm.within, on("NVIDIA H100 80GB HBM3", record("good", CASES[0], 0.0189), *LIBRARY), WITHIN, "MET",
        {"time_us": 18.9},
    ),
    "above it": (gemm.within, on("NVIDIA H100 PCIe", record("good", CASES[0], 0.0191)), WITHIN, "MISSED", {}),
    "above an H200's limit": (gemm.within, on("NVIDIA H200", record("good", CASES[0], 0.0141)), WITHIN, "MISSED", {}),
    "a card without a limit": (gemm.within, on("A100", record("good", CASES[0], 0.001)), WITHIN, "UNMEASURED", {}),
    "no time": (gemm.within, [failed("good", CASES[0])], WITHIN, "UNMEASURED", {}),
    "more where the library is slow": (
        gemm.skinny, times((1.0, 1e-3), good=(0.9, 1e-3)), SKINNY, "MET",
        {"cases where the library is slow": 1, "geomean there": 1 / 0.9},
    ),
    "its speed where that is the memory's": (gemm.skinny, times((1e-3,) * 2, good=(1e-3,) * 2), SKINNY, "MET", {}),
    "the share of reads": (of_bandwidth, COOPERATIVE, SHARE, "MET", {f"share at {CASES[0]}": 1 / 1.05}),
    "another rung reads faster": (
        of_bandwidth, [*LATE, *TMA], SHARE, "MISSED", {"best of all rungs": "tma: 100.0%, 100.0%"},
    ),
    "reads of one case": (of_bandwidth, COOPERATIVE[:1], SHARE, "UNMEASURED", {}),
    "a share of a data sheet": (
        of_bandwidth, unmeasured_ceilings(*COOPERATIVE), SHARE, "UNMEASURED", "no bandwidth was measured on this card",
    ),
    "over the better rival": (
        of_bandwidth, [*COOPERATIVE, *BESIDE], {**SHARE, "rivals": ["fa3", "flex"]}, "MET",
        {f"over fa3 at {CASES[0]}": 2.0},
    ),
    "ragged as fast as even": (attention.ragged_lengths, STEADY, LENGTHS, "MET", {}),
    "ragged slower than even": (
        attention.ragged_lengths, [*SLOW, *RAGGED_LATE], LENGTHS, "MISSED", {"kernel": "good"},
    ),
    "another rung for ragged": (
        attention.ragged_lengths, [*SLOW, *RAGGED_LATE, *SPLIT], LENGTHS, "MET",
        {"kernel": "split", "fastest with even lengths": "good"},
    ),
    "pages as fast": (attention.paged_prefill, pages(1.0, 2.0), PAIRS, "MET", {"paged over contiguous, worst": 1.0}),
    "pages slower": (attention.paged_prefill, pages(1.0, 2.2), PAIRS, "MISSED", {"paged over contiguous, worst": 1.1}),
    "no pages": (attention.paged_prefill, pages(None, 2.0), PAIRS, "UNMEASURED", {}),
}  # fmt: skip
"""What a target says of records: the function, the records, its arguments; the answer, and figures or the reason."""


@pytest.fixture
def answer(monkeypatch, tmp_path):
    """`answer(target, records, arguments, dry_run)`: what a target says of these records."""

    def run(function, records, dry_run=False, **arguments):
        for module in (measures, gemm, attention):
            monkeypatch.setattr(module, "measure", lambda *args, **options: (records, False))
        return function(Context(tmp_path, "cuda", dry_run, 10.0), **arguments)

    return run


@pytest.mark.parametrize("name", JUDGED)
def test_a_target_is_met_missed_or_unmeasured_by_its_records(answer, name):
    function, records, arguments, bar, told = JUDGED[name]
    found = answer(function, records, **arguments)
    assert found.bar == bar
    if isinstance(told, str):
        assert told in found.reason
    else:
        assert {key: found.figures[key] for key in told} == pytest.approx(told)


def test_a_rival_that_was_not_timed_at_many_rows_answers_nothing(answer):
    given = [*times((1.0, 1.0), good=(0.5, 0.5)), FA3]
    large = [dataclasses.replace(one, case_id=MANY_ROWS[CASES.index(one.case_id)]) for one in given]
    found = answer(against_library, large, **{**GEOMEAN, "cases": MANY_ROWS}, rivals=["fa3", "cudnn"])
    assert found.bar == "UNMEASURED" and found.reason == "no time of fa3 and of cudnn at 1024 rows and more"


def test_a_choice_by_a_record_comes_before_the_target_s_own(answer, monkeypatch):
    monkeypatch.setattr(measures, "recorded_choice", lambda op, card, bucket: {"kernel": "wide"})
    assert answer(against_library, MIXED, **GEOMEAN).figures["kernel"] == "wide"


@pytest.mark.parametrize(("off", "bar"), [(0.0, "MET"), (2.0**-7, "MISSED"), (math.nan, "MISSED")])
def test_the_error_of_sums_is_held_against_that_of_fp32_ones(off, bar, monkeypatch, tmp_path):
    """Naive's sums, each off by a share of what it is: 2**-7 is four times the most that bf16 rounds away."""
    naive = registry.get_kernel("gemm_fp8", "naive")
    fine = dataclasses.replace(naive, name="fine", role="optimized")
    rung = dataclasses.replace(
        fine,
        name="rung",
        fn=lambda a, b, a_scale, b_scale, bias=None, *, fast_accum=False: (
            naive.fn(a, b, a_scale, b_scale, bias) * (1 + off)
        ),
    )
    monkeypatch.setattr(measures, "usable", lambda context, op: [naive, fine, rung])
    case = "M=32,N=48,K=512,scales=tensor,bias=false"
    asked = {"op": "gemm_fp8", "case": case, "scheme": "fp8_e4m3", "most": 2.0}
    context = Context(tmp_path, "cpu", False, 10.0)
    found = gemm.accumulated(context, **asked)
    assert found.bar == bar and found.status == "DONE"
    assert found.figures["fine: largest error over fp32's"] == 1.0
    monkeypatch.setattr(measures, "usable", lambda context, op: [naive, registry.get_kernel("gemm_fp8", "promoted_ws")])
    found = gemm.accumulated(context, **asked)
    assert found.bar == "UNMEASURED" and "gemm_fp8/promoted_ws: UNSUPPORTED: needs a CUDA device" in found.reason


@pytest.mark.parametrize(
    ("alarms", "slowed", "bar"),
    [
        (0, "SLOWER", "MET"),
        (1, "UNRESOLVED", "MET"),
        (2, "SLOWER", "MISSED"),
        (0, "SAME", "MISSED"),
        (0, "INVALID", "UNMEASURED"),
    ],
)
def test_the_target_of_the_ab_counts_what_was_called_wrongly(alarms, slowed, bar, monkeypatch, tmp_path):
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
    every = {kernel.name for kernel in usable(Context(tmp_path), "gemm")}
    excluded("gemm/tensor_core")
    assert every - {kernel.name for kernel in usable(Context(tmp_path), "gemm")} == {"tensor_core"}
    why = registry.get_kernel("gemm", "tensor_core").why_not_here(torch.device("cpu"))
    assert why.status == "UNAVAILABLE" and why.reason == "excluded: TIMEOUT"


def test_a_missed_target_is_judged_again_with_the_configs_that_a_search_found(tmp_path, monkeypatch):
    name, bar = "bar:gemm.x", {"op": "gemm", "cases": CASES, "geomean": 1.0, "rungs": ["tma"]}
    RunWriter(state.folder_of(tmp_path, name), "r").write(*times((1.0, 1.0), tma=(1.25, 1.0)))
    state.save(tmp_path, name, EntryOutcome(bar="MISSED"))
    asked = []

    def tune_op(op, kernels, cases, **options):
        asked.append((op, kernels, cases))
        return types.SimpleNamespace(records=[record("tma", CASES[0], 0.8), record("tma", CASES[0], 0.9)], files=("t",))

    monkeypatch.setattr(again, "tune_op", tune_op)
    found = again.again(Context(tmp_path / "again"), {name: bar})
    assert asked == [("gemm", ["tma"], CASES)], "the worst case first"
    assert found.figures == {"gemm.x": "geomean 0.894 -> 1.118, worst 0.800 -> 1.000, met"}
    state.save(tmp_path, name, EntryOutcome(bar="MET"))
    met = again.again(Context(tmp_path / "again"), {name: bar})
    assert met.reason == "no target against the library was missed" and len(asked) == 1


def test_measuring_goes_on_with_the_cases_that_are_left(tmp_path, monkeypatch):
    """After a kernel broke the context, and a line of its record was cut."""
    kernels = [registry.get_kernel("gemm", name) for name in ("naive", "library")]
    cases = [registry.get_op("gemm").check_case(Case.parse(text)) for text in CASES]
    illegal = "CUDA error: an illegal memory access"
    first = [record(name, CASES[0], 1.0) for name in ("naive", "library")]
    broken = record("naive", CASES[1], None, reason=illegal, status="RUNTIME_ERROR", basis="bound")
    asked, rounds = [], iter([[*first, broken], [record("library", CASES[1], 1.0)]])

    class Measurement:
        def __init__(self, spec, scheme, settings, run_id, **options):
            self.run_id = run_id

        def records(self, kernels, cases):
            asked.append(([kernel.name for kernel in kernels], [case.id for case in cases]))
            for one in next(rounds):
                yield dataclasses.replace(one, run_id=self.run_id)
            if len(asked) == 1:
                raise ContextBroken(illegal)

    monkeypatch.setattr(measures, "Measurement", Measurement)
    context = Context(tmp_path, "cpu", False, 60.0)
    with pytest.raises(ContextBroken, match="illegal"):
        measures.measure(context, "gemm", kernels, cases)
    (file,) = tmp_path.glob("*.jsonl")
    assert [(one.kernel, one.status) for one in read(file)[2:]] == [("naive", "RUNTIME_ERROR")]
    with file.open("a") as cut:
        cut.write('{"op": "gemm", "ker')
    found, left = measures.measure(context, "gemm", kernels[1:], cases)
    assert asked[1] == (["library"], [CASES[1]]) and not left
    assert [one.case_id for one in found if one.kernel == "library"] == CASES and len(read(file)) == 4


def test_a_bar_that_was_cut_is_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "measure", lambda *args: ([record("good", CASES[0], 1.0)], True))
    found = against_library(Context(tmp_path), "gemm", CASES, 1.0, GOOD)
    assert (found.status, found.bar) == ("PARTIAL", "UNMEASURED")

"""What the report says: which record speaks, what is compared, where a number is from; tables, files and numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_report_synthetic import ENVIRONMENT, KEY, MEASURED, NEW, OLD, benches, make, others, verdicts, write_synthetic

from rooflab.bench.core.record_files import write
from rooflab.bench.report import words
from rooflab.bench.report.content import gather, trends
from rooflab.bench.report.ladders import ladder_lines
from rooflab.bench.report.rooflines import ceiling_tables
from rooflab.bench.report.sources import find_files, load
from rooflab.bench.report.tables import comparisons_of, compiled_tables, engine_tables
from rooflab.kernels.registry import kernels
from rooflab.roofline.device import get_device
from rooflab.roofline.numbers import digits, percent, si

CPU_RECORDS = Path(__file__).parents[2] / "results" / "cpu"
LIBRARY = {"kernel": "library", "role": "library", "backend": "torch"}
FUSED = {"kernel": "fused", "role": "optimized", "backend": "triton"}
NAIVE = {"kernel": "naive", "role": "naive", "backend": "torch"}


def bench(line, latency_ms, *, run="r1-aaaaaaaa", case="n=1", **fields):
    """A bench record of a small op; `line` is its second."""
    reading = {"basis": "measured", "latency_median_ms": latency_ms, "checked_by": "gpu"} if latency_ms else {}
    common = {"op": "my_op", "case_id": case, "case": {"n": 1}, "scheme": "bf16", **reading}
    return replace(make("bench", line, **{**common, **fields}), run_id=run)


def content(tmp_path, *records):
    write(tmp_path / "made.jsonl", *records)
    return gather(*load([tmp_path]), "test")


def rows(found, op="my_op"):
    ladders = [ladder for one in found.ops if one.op == op for ladder in one.ladders]
    return {
        (ladder.machine, block.case_id, row.kernel): row
        for ladder in ladders
        for block in ladder.blocks
        for row in block.rows
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = write_synthetic(tmp_path_factory.mktemp("records"))
    return folder, gather(*load([folder, CPU_RECORDS]), "all")


def test_the_newest_record_speaks_and_a_later_failure_takes_the_time_away(tmp_path):
    slow, fast = bench(1, 9.0, **FUSED), bench(2, 2.0, run="r2-bbbbbbbb", **FUSED)
    found = rows(content(tmp_path, fast, slow))  # the order in the file is not the order in time
    assert found[KEY, "n=1", "fused"].latency_ms == 2.0
    failed = bench(3, None, run="r3-cccccccc", status="INCORRECT", reason="off by one", **FUSED)
    again = content(tmp_path, failed)
    row = rows(again)[KEY, "n=1", "fused"]
    assert row.latency_ms is None and row.failed and row.reason == "off by one"
    assert [(problem.status, problem.name) for problem in again.problems] == [("INCORRECT", "my_op/fused")]
    right = content(tmp_path, bench(4, 2.0, run="r4-dddddddd", **FUSED))
    assert right.problems == () and right.replaced_failures == 1, "a replaced failure is counted and no problem"


def test_ratios_are_times_of_one_machine_and_of_one_run_where_there_is_one(tmp_path):
    elsewhere = {"environment": {**ENVIRONMENT, "machine_key": "another-card"}}
    found = rows(
        content(
            tmp_path,
            bench(1, 4.0, **LIBRARY),
            bench(2, 2.0, **FUSED),
            bench(3, 3.0, run="r2-bbbbbbbb", **LIBRARY),  # newer, and of another run than fused's
            bench(4, 8.0, **NAIVE, run="r2-bbbbbbbb"),
            bench(5, 1.0, **{**FUSED, "kernel": "alone"}, **elsewhere),
        )
    )
    fused = found[KEY, "n=1", "fused"]
    assert fused.over_library.value == 4.0 / 2.0 and not fused.over_library.other_run
    assert fused.over_naive.value == 8.0 / 2.0 and fused.over_naive.other_run
    assert found[KEY, "n=1", "library"].over_library is None
    assert found["another-card", "n=1", "alone"].over_library is None, "a library time of another machine was used"


def test_of_the_configurations_of_one_run_the_fastest_right_one_speaks(tmp_path):
    tried = [bench(place, ms, config={"BLOCK": place}, **FUSED) for place, ms in ((1, 3.0), (2, 2.0), (3, 4.0))]
    wrong = bench(4, None, status="INCORRECT", reason="wrong", config={"BLOCK": 4}, **FUSED)
    row = rows(content(tmp_path, *tried, wrong))[KEY, "n=1", "fused"]
    assert row.latency_ms == 2.0 and dict(row.facts)["config"] == "BLOCK 2 (fastest of 4 in its run)"


def test_the_readings_of_an_ab_are_no_results_of_their_own(tmp_path):
    whole, half = bench(1, 2.0, **FUSED), bench(2, 9.0, run="ab-first-0A", metrics={"pair": 0.0}, **FUSED)
    broken = bench(3, None, run="ab-first-1A", metrics={"pair": 1.0}, status="TIMEOUT", reason="no end", **FUSED)
    found = content(tmp_path, whole, half, broken)
    assert rows(found)[KEY, "n=1", "fused"].latency_ms == 2.0 and found.problems == () and found.trends == ()
    assert found.records == 3


def test_a_profile_gives_the_traffic_and_never_takes_the_time_away(tmp_path):
    timed = bench(1, 2.0, flops=8.0, traffic_bytes=100.0, traffic_basis="modelled", least_bytes=50.0, **FUSED)
    profile = {"traffic_bytes": 80.0, "traffic_basis": "counted", "reason": "under ncu's clock"}
    row = rows(content(tmp_path, timed, bench(2, None, run="r2-bbbbbbbb", **profile, **FUSED)))[KEY, "n=1", "fused"]
    assert row.latency_ms == 2.0 and row.traffic == "counted"
    assert row.record.bytes_per_s == pytest.approx(80.0 / 2e-3) and "made.jsonl, line 2" in dict(row.facts)["traffic"]
    other = tmp_path / "other"
    unlike = bench(2, None, run="r2-bbbbbbbb", commit=OLD, **profile, **FUSED)
    row = rows(content(other, timed, unlike))[KEY, "n=1", "fused"]
    assert row.traffic == "modelled", "another commit's kernel may move something else"


def test_a_time_that_is_no_time_is_invalid_and_nothing_is_made_of_it(tmp_path):
    for latency in (math.nan, math.inf, 0.0, -1.0):
        record = replace(bench(1, 2.0, **LIBRARY), latency_median_ms=latency)
        found = content(tmp_path / str(latency), record, bench(2, 1.0, **FUSED))
        library = rows(found)[KEY, "n=1", "library"]
        assert library.latency_ms is None and library.status == "INVALID"
        assert rows(found)[KEY, "n=1", "fused"].over_library is None
        assert [problem.status for problem in found.problems] == ["INVALID"]


def test_an_interpreted_kernel_has_no_time_and_its_check_says_who_made_it(tmp_path):
    unsupported = bench(1, None, status="UNSUPPORTED", reason="it runs in Triton's interpreter", device="cpu", **FUSED)
    error = ({"output": "c", "max_abs_error": 1.0, "max_error_over_tolerance": 0.25},)
    common = {"op": "my_op", "scheme": "fp32", "checked_by": "interpreter", "device": "cpu", **FUSED}
    right = make("check", 2, case_id="n=2", errors=error, weak=("c: zeros",), **common)
    wrong = make("check", 3, case_id="n=3", status="INCORRECT", reason="off", **common)
    other = make("check", 4, case_id="n=4", status="UNAVAILABLE", reason="not here", **common)
    found = content(tmp_path, unsupported, right, wrong, other)
    (row,) = rows(found).values()
    assert row.latency_ms is None and not row.failed
    ((one,),) = (op.checks for op in found.ops)
    assert (one.kernel, one.checked_by, one.right, one.wrong, one.not_run) == ("fused", "interpreter", 1, 1, 1)
    assert (one.worst, one.weak, one.source.line) == (0.25, 1, 4)
    assert any(gap.names == ("my_op/fused",) and "interpreter" in gap.reason for gap in found.unmeasured)


def test_the_geometric_mean_over_the_library_by_hand(tmp_path):
    records = [
        bench(1, 4.0, case="n=1", **LIBRARY),
        bench(2, 2.0, case="n=1", **FUSED),  # 2
        bench(3, 1.0, case="n=1", **{**FUSED, "kernel": "packed"}),  # 4: the fastest of its case
        bench(4, 4.0, case="n=2", **LIBRARY),
        bench(5, 16.0, case="n=2", **FUSED),  # 1/4
        bench(6, 1.0, case="n=3", **FUSED),  # no library time
    ]
    (standing,) = content(tmp_path, *records).standings
    assert (standing.over_library.cases, standing.slower_cases) == (2, 1)
    assert standing.over_library.mean == pytest.approx(math.sqrt(4 * 0.25))
    assert (standing.over_library.low, standing.over_library.high) == (0.25, 4.0)
    assert standing.kernels == ("fused", "packed") and standing.over_naive is None


def test_rungs_stand_in_the_order_of_their_ladder(whole):
    order = tuple(ladder_lines("gemm"))
    assert [name for name in order if name in ("naive", "library", "tensor_core", "pipelined", "tma", "packed")] == [
        "naive", "library", "tensor_core", "pipelined", "tma", "packed"
    ]  # fmt: skip
    assert set(order) == set(kernels("gemm")), "every kernel stands in the docstring of its ladder"
    assert ladder_lines("../gemm") == {} and ladder_lines("my_op") == {}
    gemm = next(op for op in whole[1].ops if op.op == "gemm")
    cpu = next(ladder for ladder in gemm.ladders if "epyc" in ladder.machine)
    timed = ("naive", "library", "tensor_core", "packed")
    assert {tuple(row.kernel for row in block.rows) for block in cpu.blocks} == {timed}
    one = next(ladder for ladder in gemm.ladders if ladder.machine.endswith(", 1 thread"))
    assert {tuple(row.kernel for row in block.rows) for block in one.blocks} == {("library", "packed")}
    assert tuple(name for name in gemm.order if name in timed) == timed


def test_every_time_stands_in_the_line_that_it_names(whole):
    folder, found = whole
    seen = 0
    for op in found.ops:
        for ladder in op.ladders:
            for block in ladder.blocks:
                for row in block.rows:
                    root = folder if "synthetic" in row.source.file else CPU_RECORDS
                    line = (root / Path(row.source.file).name).read_text().splitlines()[row.source.line - 1]
                    record = json.loads(line)
                    assert (record["kernel"], record["case_id"]) == (row.kernel, block.case_id)
                    if row.latency_ms is not None:
                        assert (record["latency_median_ms"], record["status"]) == (row.latency_ms, "OK")
                        seen += 1
    assert seen > 150


def test_problems_come_with_their_reasons_and_the_verdicts_that_stop_a_merge(whole, tmp_path):
    found = {(problem.name, problem.status): problem.reason for problem in whole[1].problems}
    assert found["gemm/hangs", "TIMEOUT"] == "no end after 60 s"
    assert "in L2" in found["gemm/too_fast", "INVALID"]
    verdicts = {status for (name, status) in found if "against" in name}
    assert verdicts == {"SLOWER", "INCORRECT", "MISSING"}
    slower = next(reason for (_, status), reason in found.items() if status == "SLOWER")
    assert slower == "its time is +5.1% against its baseline's, bounds +4.1% to +6.1%"
    assert whole[1].replaced_failures == 1
    none = content(tmp_path, make("ab", 1, op="my_op", case_id="n=1", scheme="bf16", **FUSED))
    assert [problem.status for problem in none.problems] == ["NO VERDICT"]


def test_what_nobody_measured_is_named(whole, tmp_path):
    gaps = whole[1].unmeasured
    assert any("epyc" in gap.machine and "gemm/tensor_core" in gap.names for gap in gaps)
    absent = next(gap for gap in gaps if gap.machine == KEY and gap.status == "NO RECORD")
    assert "rope/fused" in absent.names and "gemm/library" not in absent.names
    few = content(tmp_path, bench(1, 1.0, **FUSED)).unmeasured
    assert few[-1].names == ("checks", "measured ceilings", "engine runs", "A/B verdicts", "compiled code")


def test_a_record_says_its_circumstances_and_leaves_out_what_it_has_not(tmp_path):
    given = {"flops": 2e9, "least_bytes": 5e8, "traffic_bytes": 1e9, "intensity": 2.0, "bound_ms": 0.1234}
    given |= {"limiter": "memory", "timer": "events", "l2_state": "cold", "sample_count": 50, "weak": ("out: zeros",)}
    given |= {"errors": ({"output": "out", "max_error_over_tolerance": 0.5},), "predicted_ms": 0.2}
    given |= {"prediction_error": 0.1, "peak_memory_bytes": 2e6, "clocks": {"power_w": [212.0, 655.0], "x": None}}
    row = rows(content(tmp_path, bench(1, 1.0, config={"BLOCK": 64}, **given, **FUSED)))[KEY, "n=1", "fused"]
    assert dict(row.facts) == {
        "made": "2026-01-02 00:00 UTC",
        "commit": NEW[:8],
        "backend": "triton",
        "config": "BLOCK 64",
        "timer": "events, cold cache",
        "samples": "50",
        "bound": "123.4 µs, memory",
        "FLOPs of the op": "2 GFLOP",
        "least bytes": "500 MB",
        "traffic": "1 GB, modelled",
        "intensity": "2.00 FLOP/byte",
        "peak memory": "2 MB",
        "predicted": "200.0 µs, held-out error 10.0%",
        "checked by": "gpu",
        "largest error over tolerance": "out 0.5000",
        "tolerance would pass": "out: zeros",
        "power (W)": "212 to 655",
    }


def test_the_machines_say_their_versions_and_clocks_and_where_runs_differ(tmp_path, whole):
    assert {text for text, _ in whole[1].commits} >= {f"{OLD[:8]} dirty", NEW[:8], "dd285b84"}
    machine = next(machine for machine in whole[1].machines if machine.key == KEY)
    facts = {fact.label: fact.values for fact in machine.facts}
    assert facts["driver"] == ("000.00-synthetic",) and facts["torch"] == ("2.11.0+cu130",)
    assert facts["SM clock range"] == ("1.75 GHz to 1.8 GHz",) and facts["power (W)"] == ("212 to 655",)
    assert facts["clock held back by"] == ("software power cap",)
    newer = {"environment": {**ENVIRONMENT, "torch": "2.99"}}
    free = {"clocks": {"throttle_reasons": 0, "throttle_names": [], "power_w": None}}
    (both,) = content(tmp_path, bench(1, 1.0, **FUSED, **free), bench(2, 1.0, **LIBRARY, **newer)).machines
    facts = {fact.label: fact.values for fact in both.facts}
    assert facts["torch"] == ("2.11.0+cu130", "2.99") and facts["clock held back by"] == ("none",)
    assert "power (W)" not in facts


def test_a_point_needs_a_bound_and_a_known_op_and_a_failure_is_none(whole):
    gpu = next(one for one in whole[1].rooflines if one.machine == KEY)
    assert gpu.name == "NVIDIA H200" and {one.kind for one in gpu.ceilings} == {"measured", "datasheet", "at_clock"}
    names = {point.label for point in gpu.points}
    assert "tensor_core" in names and not names & {"hangs", "too_fast"}
    cpu = next(one for one in whole[1].rooflines if one.machine != KEY)
    assert all(point.seconds for point in cpu.points), "a GPU's kernel has no place below a CPU's roof"


def test_more_bytes_a_second_than_the_roof_are_marked(tmp_path):
    ceilings = {"device": "d", "kind": "measured", "hbm_bytes_per_s": 1e12, "tensor_flops_per_s": {}}
    given = {"ceilings": {**ceilings, "vector_flops_per_s": 1e12}, "least_bytes": 1.0}
    records = [
        bench(1, 1.0, bytes_per_s=1.04e12, **given, **FUSED),
        bench(2, 1.0, bytes_per_s=1.2e12, **given, **LIBRARY),
    ]
    found = rows(content(tmp_path, *records))
    assert not found[KEY, "n=1", "fused"].above_roof and found[KEY, "n=1", "library"].above_roof


GEMM = {**FUSED, "op": "gemm", "kernel": "tensor_core", "case_id": "M=1", "scheme": "bf16"}


def located_in(tmp_path, *records):
    write(tmp_path / "made.jsonl", *records)
    return load([tmp_path])[0]


def test_verdicts_stand_worst_first_with_effect_bounds_and_what_could_be_seen(tmp_path):
    found = comparisons_of(located_in(tmp_path, *verdicts()))
    assert [one.verdict for one in found] == ["INCORRECT", "MISSING", "SLOWER", "UNRESOLVED", "FASTER", "SAME"]
    slower = found[2]
    assert slower.why == "its time is +5.1% against its baseline's, bounds +4.1% to +6.1%"
    assert slower.baseline == f"rung_2 at {OLD[:8]}" and [one.stops for one in found] == [True] * 3 + [False] * 3


def test_compiled_code_shows_what_any_of_a_tables_rows_has(tmp_path):
    first = {"zebra_stripes": 1, "registers": 168, "occupancy": 0.25, "grid": [132, 1], "spill_loads": 0}
    second = {"spill_stores": 3, "loop": {"depth": 1, "counts": {"wgmma": 4, "tma": 2}}, "registers": 90}
    second |= {"findings": ["warp_specialize is ignored"], "shared_bytes": 163_840}
    (table,) = compiled_tables(
        located_in(tmp_path, make("static", 1, compiled=(first, second), predicted_ms=0.5, **GEMM))
    )
    assert " ".join(table.columns) == "findings registers spill_stores shared_bytes occupancy grid loop_counts"
    one, other = (row.texts for row in table.rows)
    assert one == {"registers": "168", "occupancy": "0.250", "grid": "132×1"}
    assert other["loop_counts"] == "wgmma 4, tma 2" and other["findings"] == "warp_specialize is ignored"
    assert other["shared_bytes"] == "164 kB" and table.rows[0].predicted == "500.0 µs, uncalibrated"
    failed = make("static", 1, status="COMPILE_ERROR", reason="ptxas: no", **GEMM)
    (table,) = compiled_tables(located_in(tmp_path / "failed", failed))
    assert table.rows[0].failed and table.rows[0].record.reason == "ptxas: no"


def test_ceilings_of_three_kinds_stand_side_by_side(tmp_path):
    (table,) = ceiling_tables(located_in(tmp_path, *others(), *benches(schemes=("bf16",), ops=("rmsnorm",))))
    found = {row.name: row for row in table.rows}
    matrix, sheet = found["matrix bf16"], get_device("h200").ceilings().tensor_flops_per_s["bf16"]
    rates = {"measured": MEASURED.tensor_flops_per_s["bf16"], "datasheet": sheet, "at_clock": sheet * 1770 / 1830}
    assert matrix.texts == {kind: f"{si(rate)}FLOP/s" for kind, rate in rates.items()}
    assert table.clock == "1,770 MHz", "the clock read on the device"
    assert matrix.share == pytest.approx(MEASURED.tensor_flops_per_s["bf16"] / sheet) and len(table.sources) == 1
    readings = {row.name: (row.text, row.how) for row in table.readings}
    idle_first = make("ceiling", 1, kernel="hbm_read", clocks={"sm_clock_mhz": [345, 1700]})
    (one,) = ceiling_tables(located_in(tmp_path / "nvml", idle_first))
    assert one.clock == "1,700 MHz", "else the highest that NVML saw"
    assert readings["hbm_read"] == ("4.31 TB/s", "events, ctas 264") and readings["launch events"][0] == "1.90 µs"


def test_a_microkernel_that_failed_is_a_problem_in_every_launch_shape(tmp_path):
    failed = {"status": "INCORRECT", "reason": "sum is 3, not 4", "kernel": "hbm_read"}
    shapes = [make("ceiling", 1, config={"ctas": number}, **failed) for number in (1, 2)]
    write(tmp_path / "made.jsonl", *shapes)
    found = gather(*load([tmp_path]), "t")
    assert [(problem.name, problem.status) for problem in found.problems] == [("hbm_read", "INCORRECT")] * 2
    assert found.ceilings[0].readings == ()


def test_engine_runs_show_latencies_and_the_kernels_that_served(tmp_path):
    (table,) = engine_tables(located_in(tmp_path, *others()))
    assert table.name == "generate"
    assert table.columns[:2] == ("TTFT p50 (ms)", "ITL p50 (ms)") and "output (tokens/s)" in table.columns
    (row,) = table.rows
    assert row.texts[0] == "21.5" and row.kernels == "gemm=tensor_core, rmsnorm=fused"
    assert "llama-3.1-8b" in row.options and "tensor_core" not in row.options
    served = {"ttft_p50_ms": 20.0, "output_tokens_per_s": 100.0}
    runs = [
        make("engine", 1, case_id="batch 1", metrics={**served, "itl_p50_ms": 5.0}),
        make("engine", 2, case_id="batch 8", metrics=served),  # one token a request: no ITL
        make("engine", 3, case_id="host", metrics={"host_ms_median": 0.1}),
    ]
    first, second = engine_tables(located_in(tmp_path / "batches", *runs))
    assert first.name == "Runs of requests" and [row.record.case_id for row in first.rows] == ["batch 1", "batch 8"]
    assert first.rows[1].texts[first.columns.index("ITL p50 (ms)")] == "" and second.name == "host"


def test_runs_of_one_name_are_apart_by_their_options(tmp_path):
    served = {"case_id": "load", "metrics": {"ttft_p50_ms": 20.0}}
    failed = make("engine", 1, case={"rate": 100.4}, status="RUNTIME_ERROR", reason="no answer", **served)
    later = [make("engine", 2, case={"rate": 100.3}, **served), make("engine", 3, case={"rate": 100.3}, **served)]
    found = content(tmp_path, failed, *later)
    assert [(one.name, one.status) for one in found.problems] == [("load", "RUNTIME_ERROR")], "no newer load hides it"
    (table,) = found.engine
    assert [row.record.case["rate"] for row in table.rows] == [100.4, 100.3]


def test_history_takes_one_time_a_commit_and_needs_two(tmp_path):
    old = benches(OLD, 2.0, ("bf16",), ("rmsnorm",))
    new = benches(NEW, 1.0, ("bf16",), ("rmsnorm",))
    assert trends(located_in(tmp_path / "one", *new)) == ()
    found = {trend["kernel"]: trend for trend in trends(located_in(tmp_path / "two", *new, *old))}
    naive = found["naive"]
    assert (naive["points"], naive["state"]) == (2, "SHORT") and naive["latest"].startswith(NEW[:8])
    assert naive["source"].run_id == new[0].run_id and naive["trend"] == "█▁", "the newer one is faster"


def line_of(**changes):
    return json.dumps({**json.loads(benches(schemes=("bf16",), ops=("rmsnorm",))[0].to_json()), **changes})


def test_a_damaged_record_is_named_by_file_and_line(tmp_path):
    for text, message in (
        ('{"kind": "bench"', "made.jsonl, line 2: "),
        (line_of(latency_median_ms="fast"), "made.jsonl, line 2: latency_median_ms: expected a number, got 'fast'"),
        (line_of(latency_median_ms=True), "line 2: latency_median_ms: expected a number, got True"),
        (line_of(metrics={"pairs": "many"}), "line 2: metrics.pairs: expected a number, got 'many'"),
        (line_of(schema_version="2.0"), "line 2: schema_version: expected 1.x, got 2.0"),
        (line_of(timestamp="yesterday"), "line 2: .*yesterday"),
        (line_of(environment=[1]), "line 2: environment: expected an object"),
        (line_of(environment={"gpu": "H200"}), "line 2: environment.gpu: expected an object, got 'H200'"),
        (line_of(ceilings={"device": "x"}), "line 2: ceilings.tensor_flops_per_s: expected an object, got None"),
        (line_of(compiled=[1]), "line 2: compiled: expected an object, got 1"),
        (line_of(kernel=7), "line 2: kernel: expected str, got 7"),
    ):
        (tmp_path / "made.jsonl").write_text(f"{line_of()}\n{text}\n")
        with pytest.raises(ValueError, match=message):
            load([tmp_path])
    (tmp_path / "made.jsonl").write_text(line_of())
    with pytest.raises(ValueError, match=r"made\.jsonl, line 1: the last record is truncated"):
        load([tmp_path])


def test_files_are_found_at_any_depth_each_once_and_no_records_are_no_report(tmp_path):
    for path, message in ((tmp_path / "none", "a file or folder, got"), (tmp_path, r"\*.jsonl files, found none")):
        with pytest.raises(ValueError, match=f"records: expected {message}"):
            load([path])
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "made.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="records: expected at least one"):
        load([tmp_path])
    (deep / "made.jsonl").write_text(f"\n{line_of()}\n")
    (tmp_path / "copy.jsonl").write_text(f"{line_of()}\n")
    (tmp_path / "notes.txt").write_text("no record\n")
    assert len(find_files([tmp_path, deep, deep / "made.jsonl"])) == 2
    found, files = load([deep, tmp_path])
    assert [(item.source.line, item.source.file) for item in found] == [(2, "b/made.jsonl")], "the copy counts once"
    assert [file.records for file in files] == [1, 0]


def test_numbers_are_written_as_a_reader_wants_them():
    for written, text in (
        (digits(1234.5), "1,234"),
        (digits(0.99951), "1.00"),
        (digits(0.0123456), "0.0123"),
        (digits(1.23e-7), "1.23e-07"),
        (digits(math.nan), "not a number"),
        (digits(-math.inf), "-infinite"),
        (percent(0.0514, signed=True), "+5.1%"),
        (percent(-0.0001), "0.0%"),
        (words.in_unit(0.0123456, "us"), "12.35"),
        (words.metric_label("itl_p50_ms"), "ITL p50 (ms)"),
        (words.metric_text("hbm_read_bytes_per_s", 3.91e12), "3.91 TB/s"),
        (words.commit_text(None, None), "no commit"),
        (words.plain_value({"a": [1, 2.5], "b": None}), "a 1, 2.500, b none"),
        (words.moment("2026-01-02T03:04:05+02:00"), "2026-01-02 01:04 UTC"),
        (words.time_unit([0.5, 0.9, 2.0]), "us"),
        (words.time_unit([]), "ms"),
    ):
        assert written == text

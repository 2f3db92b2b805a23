"""The report's other sections, its reading of files, and how it writes numbers."""

import json
import math

import pytest
from test_report_synthetic import NEW, OLD, benches, make, others, verdicts, write_synthetic

from rooflab.bench.records.files import write
from rooflab.bench.report import words
from rooflab.bench.report.ceilings import ceiling_tables
from rooflab.bench.report.comparisons import comparisons_of
from rooflab.bench.report.compiled import compiled_tables
from rooflab.bench.report.content import gather
from rooflab.bench.report.engine import engine_tables
from rooflab.bench.report.history import trends
from rooflab.bench.report.sources import find_files, load
from rooflab.roofline.device import get_device

GEMM = {
    "op": "gemm",
    "kernel": "tensor_core",
    "role": "optimized",
    "backend": "triton",
    "case_id": "M=1",
    "scheme": "bf16",
}


def located(tmp_path, *records):
    write(tmp_path / "made.jsonl", *records)
    return load([tmp_path])[0]


def test_verdicts_stand_worst_first_with_effect_bounds_and_what_could_be_seen(tmp_path):
    found = comparisons_of(located(tmp_path, *verdicts()))
    assert [one.verdict for one in found] == ["INCORRECT", "MISSING", "SLOWER", "UNRESOLVED", "FASTER", "SAME"]
    slower = found[2]
    assert (slower.effect, slower.low, slower.high) == (0.051, pytest.approx(0.041), pytest.approx(0.061))
    assert (slower.smallest, slower.pairs, slower.a_ms) == (0.012, 24.0, 0.02)
    assert slower.baseline == f"rung_2 at {OLD[:8]}"
    faster, same = found[4].interval, found[5].interval
    assert faster.high < 70 < slower.interval.low and same.low < 70 < same.high, "70 is no effect"


def test_a_bound_that_is_infinite_is_drawn_open(tmp_path):
    metrics = {"effect": 0.1, "effect_low": 0.05, "effect_high": math.inf}
    (found,) = comparisons_of(located(tmp_path, make("ab", 1, verdict="SLOWER", metrics=metrics, **GEMM)))
    assert found.high == math.inf and found.interval.open_high and found.interval.high < 140


def test_compiled_code_shows_whatever_keys_there_are_known_ones_first(tmp_path):
    first = {"zebra_stripes": 1, "registers": 168, "counts": {f"op{n}": n for n in range(40)}, "grid": [132, 1]}
    second = {"spill_stores": 3, "loop": {"depth": 1, "counts": {"wgmma": 4, "tma": 2}}, "ptx": "x" * 5000}
    option = {"name": "warp_specialize", "took_effect": False}
    second |= {"registers": 90, "findings": ["warp_specialize is ignored"], "options": [option], "code_hash": "0f" * 32}
    (table,) = compiled_tables(located(tmp_path, make("static", 1, compiled=(first, second), predicted_ms=0.5, **GEMM)))
    assert table.columns[:5] == ("findings", "registers", "spill stores", "grid", "loop depth")
    assert set(table.columns[-3:]) == {"zebra stripes", "ptx", "code hash"}
    cells = [dict(zip(table.columns, row.cells, strict=True)) for row in table.rows]
    assert cells[0]["grid"].text == "132×1" and cells[0]["spill stores"].text == ""
    assert cells[0]["counts"].text.startswith("op0 0, op1 1") and cells[0]["counts"].text.endswith("and 28 more")
    assert cells[1]["loop counts"].text == "wgmma 4, tma 2" and cells[1]["options"].text == "warp_specialize: no effect"
    assert cells[1]["spill stores"].warn and cells[1]["findings"].warn and not cells[1]["registers"].warn
    assert cells[1]["ptx"].text == "5,000 characters" and cells[1]["code hash"].text == "0f0f0f0f0f0f"
    assert table.rows[0].predicted == "500.0 µs, uncalibrated"


def test_a_kernel_that_did_not_compile_keeps_its_reason(tmp_path):
    failed = make("static", 1, status="COMPILE_ERROR", reason="ptxas: no", **GEMM)
    (table,) = compiled_tables(located(tmp_path, failed))
    assert table.rows[0].failed and table.rows[0].reason == "ptxas: no"


def test_ceilings_of_three_kinds_stand_side_by_side(tmp_path):
    (table,) = ceiling_tables(located(tmp_path, *others(), *benches(schemes=("bf16",), ops=("rmsnorm",))))
    found = {row.name: row for row in table.rows}
    measured, sheet, at_clock = found["matrix bf16"].rates
    assert sheet.value == get_device("h200").ceilings().tensor_flops_per_s["bf16"]
    assert at_clock.value == pytest.approx(sheet.value * 1770 / 1830, rel=1e-3), "the clock read on the device"
    assert table.clock == "1,770 MHz"
    assert measured.source is not None and sheet.source is None, "the data sheet is no record's"
    assert found["matrix bf16"].share == pytest.approx(measured.value / sheet.value)
    readings = {row.name: row for row in table.readings}
    assert readings["hbm_read"].rates[0].text == "4.31 TB/s" and readings["hbm_read"].how == "events, ctas 264"
    assert readings["bf16 wgmma"].rates[2].value == pytest.approx(sheet.value), "at the clock of that very reading"
    assert readings["launch events"].rates[0].text == "1.90 µs" and readings["launch events"].share is None


def test_without_a_clock_of_the_device_the_highest_that_nvml_saw_counts(tmp_path):
    idle_first = {"sm_clock_mhz": [345, 1700]}
    (table,) = ceiling_tables(located(tmp_path, make("ceiling", 1, kernel="hbm_read", clocks=idle_first)))
    assert table.clock == "1,700 MHz"


def test_a_microkernel_that_failed_is_a_problem_in_every_launch_shape(tmp_path):
    failed = {"status": "INCORRECT", "reason": "sum is 3, not 4", "kernel": "hbm_read"}
    shapes = [make("ceiling", 1, config={"ctas": number}, **failed) for number in (1, 2)]
    write(tmp_path / "made.jsonl", *shapes)
    found = gather(*load([tmp_path]), "t")
    assert [(problem.name, problem.status) for problem in found.problems] == [("hbm_read", "INCORRECT")] * 2
    assert found.ceilings[0].readings == ()


def test_engine_runs_show_latencies_and_the_kernels_that_served(tmp_path):
    (table,) = engine_tables(located(tmp_path, *others()))
    assert (table.name, table.rows[0].name) == ("generate", "generate")
    assert table.columns[:2] == ("TTFT p50 (ms)", "ITL p50 (ms)") and "output (tokens/s)" in table.columns
    (row,) = table.rows
    assert row.values[0] == "21.5" and row.kernels == "gemm=tensor_core, rmsnorm=fused"
    assert "llama-3.1-8b" in row.options and "tensor_core" not in row.options


def test_engine_runs_of_other_batches_stand_in_one_table(tmp_path):
    served = {"ttft_p50_ms": 20.0, "output_tokens_per_s": 100.0}
    runs = [
        make("engine", 1, case_id="batch 1", metrics={**served, "itl_p50_ms": 5.0}),
        make("engine", 2, case_id="batch 8", metrics=served),  # one token a request: no ITL
        make("engine", 3, case_id="host", metrics={"host_ms_median": 0.1}),
    ]
    first, second = engine_tables(located(tmp_path, *runs))
    assert first.name == "Runs of requests" and [row.name for row in first.rows] == ["batch 1", "batch 8"]
    assert first.rows[1].values[first.columns.index("ITL p50 (ms)")] == ""
    assert second.name == "host"


def test_history_takes_one_time_a_commit_and_needs_two(tmp_path):
    old = benches(OLD, 2.0, ("bf16",), ("rmsnorm",))
    new = benches(NEW, 1.0, ("bf16",), ("rmsnorm",))
    assert trends(located(tmp_path / "one", *new)) == ()
    found = {trend.kernel: trend for trend in trends(located(tmp_path / "two", *new, *old))}
    naive = found["naive"]
    assert [moment.commit for moment in naive.moments] == [f"{OLD[:8]} dirty", NEW[:8]]
    assert naive.change == pytest.approx(naive.moments[1].latency_ms / naive.moments[0].latency_ms - 1)
    assert naive.change < -0.3 and naive.moments[0].y < naive.moments[1].y, "slower is higher up"


def line_of(**changes):
    return json.dumps({**json.loads(benches(schemes=("bf16",), ops=("rmsnorm",))[0].to_json()), **changes})


@pytest.mark.parametrize(
    "text, message",
    [
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
    ],
)
def test_a_damaged_record_is_named_by_file_and_line(tmp_path, text, message):
    (tmp_path / "made.jsonl").write_text(f"{line_of()}\n{text}\n")
    with pytest.raises(ValueError, match=message):
        load([tmp_path])


def test_a_cut_off_file_is_refused(tmp_path):
    (tmp_path / "cut.jsonl").write_text(line_of())
    with pytest.raises(ValueError, match=r"cut\.jsonl, line 1: the last record is truncated"):
        load([tmp_path])


def test_files_are_found_at_any_depth_each_once_and_blank_lines_count(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "made.jsonl").write_text(f"\n{line_of()}\n")
    (tmp_path / "copy.jsonl").write_text(f"{line_of()}\n")
    (tmp_path / "notes.txt").write_text("no record\n")
    assert len(find_files([tmp_path, deep, deep / "made.jsonl"])) == 2
    found, files = load([deep, tmp_path])
    assert [(item.source.line, item.source.file) for item in found] == [(2, "b/made.jsonl")], "the copy counts once"
    assert [file.records for file in files] == [1, 0]


@pytest.mark.parametrize(
    "make_path, message",
    [
        (lambda folder: folder / "none", "records: expected a file or folder, got"),
        (lambda folder: folder, r"records: expected \*.jsonl files, found none"),
    ],
)
def test_no_records_are_no_report(tmp_path, make_path, message):
    with pytest.raises(ValueError, match=message):
        load([make_path(tmp_path)])


def test_an_empty_file_is_no_report(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="records: expected at least one"):
        load([tmp_path])


def test_the_same_records_give_the_same_content(tmp_path):
    folder = write_synthetic(tmp_path)
    assert gather(*load([folder]), "t") == gather(*load([folder]), "t")


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: words.digits(1234.5), "1,234"),
        (lambda: words.digits(0.99951), "1.00"),
        (lambda: words.digits(0.0123456), "0.0123"),
        (lambda: words.digits(1.23e-7), "1.23e-07"),
        (lambda: words.digits(math.nan), "not a number"),
        (lambda: words.digits(-math.inf), "-infinite"),
        (lambda: words.percent(0.0514, signed=True), "+5.1%"),
        (lambda: words.percent(-0.0001), "0.0%"),
        (lambda: words.in_unit(0.0123456, "us"), "12.35"),
        (lambda: words.metric_label("itl_p50_ms"), "ITL p50 (ms)"),
        (lambda: words.metric_text("hbm_read_bytes_per_s", 3.91e12), "3.91 TB/s"),
        (lambda: words.throttling(0x4 | 0x1000), "software power cap, 0x1000"),
        (lambda: words.commit_text(None, None), "no commit"),
        (lambda: words.plain_value({"a": [1, 2.5], "b": None}), "a 1, 2.500, b none"),
        (lambda: words.moment("2026-01-02T03:04:05+02:00"), "2026-01-02 01:04 UTC"),
        (lambda: words.time_unit([0.5, 0.9, 2.0]), "us"),
        (lambda: words.time_unit([]), "ms"),
    ],
)
def test_numbers_are_written_as_a_reader_wants_them(call, text):
    assert call() == text

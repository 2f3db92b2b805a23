"""The report's tables: verdicts, compiled code, ceilings, runs of the engine; and the form of its numbers."""

import math

import pytest
from synthetic import CASE, MEASURED, OLD, TUNED, benches, make, others, verdicts

from rooflab.bench.core.record_files import write
from rooflab.bench.report import facts
from rooflab.bench.report.content import gather
from rooflab.bench.report.rooflines import ceiling_tables
from rooflab.bench.report.sources import load
from rooflab.bench.report.tables import comparisons_of, compiled_tables, engine_tables
from rooflab.roofline import numbers
from rooflab.roofline.device import get_device
from rooflab.roofline.numbers import digits, percent, si


@pytest.fixture
def located(tmp_path):
    """The records as a report reads them from a file of their own."""

    def of(*records):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write(folder / "made.jsonl", *records)
        return load([folder])[0]

    return of


def test_verdicts_stand_worst_first_with_effect_bounds_and_what_could_be_seen(located):
    found = comparisons_of(located(*verdicts()))
    assert [one["verdict"] for one in found] == ["INCORRECT", "MISSING", "SLOWER", "UNRESOLVED", "FASTER", "SAME"]
    assert [one["stops"] for one in found] == [True] * 3 + [False] * 3
    assert found[2]["why"] == "its time is +5.1% against its baseline's, bounds +4.1% to +6.1%"
    assert found[2]["baseline"] == f"rung_2 at {OLD[:8]}"


def test_compiled_code_shows_what_any_of_a_tables_rows_has(located):
    first = {"zebra_stripes": 1, "registers": 168, "occupancy": 0.25, "grid": [132, 1], "spill_loads": 0}
    second = {"spill_stores": 3, "loop": {"depth": 1, "counts": {"wgmma": 4, "tma": 2}}, "registers": 90}
    second |= {"findings": ["warp_specialize is ignored"], "shared_bytes": 163_840}
    (table,) = compiled_tables(located(make("static", 1, compiled=(first, second), predicted_ms=0.5, **CASE, **TUNED)))
    assert " ".join(table["columns"]) == "findings registers spill_stores shared_bytes occupancy grid loop_counts"
    one, other = (row["texts"] for row in table["rows"])
    assert one == {"registers": "168", "occupancy": "0.250", "grid": "132×1"}
    assert other["loop_counts"] == "wgmma 4, tma 2" and other["shared_bytes"] == "164 kB"
    assert table["rows"][0]["predicted"] == "500.0 µs, uncalibrated"
    failed = make("static", 1, status="COMPILE_ERROR", reason="ptxas: no", **CASE, **TUNED)
    (table,) = compiled_tables(located(failed))
    assert table["rows"][0]["failed"] and table["rows"][0]["record"].reason == "ptxas: no"


def test_ceilings_of_three_kinds_stand_side_by_side(located):
    (table,) = ceiling_tables(located(*others(), *benches(schemes=("bf16",), ops=("rmsnorm",))))
    matrix, sheet = MEASURED.tensor_flops_per_s["bf16"], get_device("h200").ceilings().tensor_flops_per_s["bf16"]
    row = next(row for row in table["rows"] if row["name"] == "matrix bf16")
    rates = {"measured": matrix, "datasheet": sheet, "at_clock": sheet * 1770 / 1830}
    assert row["texts"] == {kind: f"{si(rate)}FLOP/s" for kind, rate in rates.items()}
    assert row["share"] == pytest.approx(matrix / sheet) and len(table["sources"]) == 1
    readings = {row["name"]: (row["text"], row["how"]) for row in table["readings"]}
    assert readings["hbm_read"] == ("4.31 TB/s", "events, ctas 264") and readings["launch events"][0] == "1.90 µs"


def test_the_ceilings_clock_is_the_lowest_that_the_device_read_and_else_the_highest_that_nvml_saw(located):
    for clocks, said in (
        ([{"sm_clock_hz": 1.77e9, "sm_clock_mhz": [345, 1980]}, {"sm_clock_hz": 1.5e9}], "1,500 MHz"),
        ([{"sm_clock_mhz": [345, 1700]}], "1,700 MHz"),
    ):
        (table,) = ceiling_tables(located(*(make("ceiling", 1, kernel="hbm_read", clocks=one) for one in clocks)))
        assert table["clock"] == said


def test_engine_runs_show_latencies_and_the_kernels_that_served(located):
    (table,) = engine_tables(located(*others()))
    (row,) = table["rows"]
    assert table["name"] == "generate" and table["columns"][:2] == ("TTFT p50 (ms)", "ITL p50 (ms)")
    assert row["texts"][0] == "21.5" and row["kernels"] == "gemm=tensor_core, rmsnorm=fused"
    assert "llama-3.1-8b" in row["options"] and "tensor_core" not in row["options"]
    served = {"ttft_p50_ms": 20.0, "output_tokens_per_s": 100.0}
    runs = [
        make("engine", 1, case_id="batch 1", metrics={**served, "itl_p50_ms": 5.0}),
        make("engine", 2, case_id="batch 8", metrics=served),  # one token a request: no ITL
        make("engine", 3, case_id="host", metrics={"host_ms_median": 0.1}),
    ]
    first, second = engine_tables(located(*runs))
    assert first["name"] == "Runs of requests"
    assert [row["record"].case_id for row in first["rows"]] == ["batch 1", "batch 8"]
    assert first["rows"][1]["texts"][first["columns"].index("ITL p50 (ms)")] == "" and second["name"] == "host"


def test_runs_of_one_name_are_apart_by_their_options(located):
    served = {"case_id": "load", "metrics": {"ttft_p50_ms": 20.0}}
    failed = make("engine", 1, case={"rate": 100.4}, status="RUNTIME_ERROR", reason="no answer", **served)
    later = [make("engine", 2, case={"rate": 100.3}, **served), make("engine", 3, case={"rate": 100.3}, **served)]
    found = gather(located(failed, *later), [], "t")
    assert [(one["name"], one["status"]) for one in found.problems] == [("load", "RUNTIME_ERROR")], (
        "no newer load hides it"
    )
    assert [row["record"].case["rate"] for row in found.engine[0]["rows"]] == [100.4, 100.3]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (digits(0.99951), "1.00"),
        (digits(math.nan), "not a number"),
        (percent(0.0514, signed=True), "+5.1%"),
        (numbers.in_unit(0.0123456, "us"), "12.35"),
        (facts.moment("2026-01-02T03:04:05+02:00"), "2026-01-02 01:04 UTC"),
        (numbers.time_unit([0.5, 0.9, 2.0]), "us"),
    ],
)
def test_numbers_are_written_as_a_reader_wants_them(written, text):
    assert written == text

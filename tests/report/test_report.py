"""The report's content: the record that counts, comparisons, the source of a number, and wrong or missing results."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import ENVIRONMENT, KEY, OLD, make, write_synthetic

from rooflab.bench.core.record_files import write
from rooflab.bench.report.content import gather
from rooflab.bench.report.sources import find_files, load

CPU_RECORDS = Path(__file__).parents[2] / "results" / "cpu"
LIBRARY = {"kernel": "library", "role": "library", "backend": "torch"}
FUSED = {"kernel": "fused", "role": "optimized", "backend": "triton"}
NAIVE = {"kernel": "naive", "role": "naive", "backend": "torch"}
WRONG = {"status": "INCORRECT", "reason": "off by one"}


def bench(line, latency_ms, *, run="r1-aaaaaaaa", case="n=1", **fields):
    """A bench record of a small op; `line` is its second."""
    reading = {"basis": "measured", "latency_median_ms": latency_ms, "checked_by": "gpu"} if latency_ms else {}
    common = {"op": "my_op", "case_id": case, "case": {"n": 1}, "scheme": "bf16", **reading}
    return replace(make("bench", line, **{**common, **fields}), run_id=run)


def content(folder, *records):
    write(folder / "made.jsonl", *records)
    return gather(*load([folder]), "test")


def rows(found):
    """Every row of every ladder by machine, case and kernel."""
    ladders = [ladder for op in found.ops for ladder in op["ladders"]]
    return {
        (ladder.machine, block["case_id"], row.kernel): row
        for ladder in ladders
        for block in ladder.blocks
        for row in block["rows"]
    }


def fused(found):
    return rows(found)[KEY, "n=1", "fused"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = write_synthetic(tmp_path_factory.mktemp("records"))
    return folder, gather(*load([folder, CPU_RECORDS]), "all")


def test_the_newest_record_speaks_and_a_later_failure_takes_the_time_away(tmp_path):
    slow, fast = bench(1, 9.0, **FUSED), bench(2, 2.0, run="r2-bbbbbbbb", **FUSED)
    assert fused(content(tmp_path, fast, slow)).latency_ms == 2.0, "the order in the file is not the order in time"
    again = content(tmp_path, bench(3, None, run="r3-cccccccc", **WRONG, **FUSED))
    assert fused(again).latency_ms is None and fused(again).failed and fused(again).reason == "off by one"
    assert [(problem["status"], problem["name"]) for problem in again.problems] == [("INCORRECT", "my_op/fused")]
    right = content(tmp_path, bench(4, 2.0, run="r4-dddddddd", **FUSED))
    assert right.problems == () and right.replaced_failures == 1, "a replaced failure is counted and no problem"


def test_ratios_are_times_of_one_machine_and_of_one_run_where_there_is_one(tmp_path):
    elsewhere = {"environment": {**ENVIRONMENT, "machine_key": "another-card"}}
    records = [
        bench(1, 4.0, **LIBRARY),
        bench(2, 2.0, **FUSED),
        bench(3, 3.0, run="r2-bbbbbbbb", **LIBRARY),  # newer, and of another run than fused's
        bench(4, 8.0, **NAIVE, run="r2-bbbbbbbb"),
        bench(5, 1.0, **{**FUSED, "kernel": "alone"}, **elsewhere),
    ]
    found = rows(content(tmp_path, *records))
    own = found[KEY, "n=1", "fused"]
    assert own.over_library["value"] == 4.0 / 2.0 and not own.over_library["other_run"]
    assert own.over_naive["value"] == 8.0 / 2.0 and own.over_naive["other_run"]
    assert found[KEY, "n=1", "library"].over_library is None
    assert found["another-card", "n=1", "alone"].over_library is None, "a library time of another machine was used"


def test_of_the_configurations_of_one_run_the_fastest_right_one_speaks(tmp_path):
    tried = [bench(place, ms, config={"BLOCK": place}, **FUSED) for place, ms in ((1, 3.0), (2, 2.0), (3, 4.0))]
    row = fused(content(tmp_path, *tried, bench(4, None, config={"BLOCK": 4}, **WRONG, **FUSED)))
    assert row.latency_ms == 2.0 and dict(row.facts)["config"] == "BLOCK 2 (fastest of 4 in its run)"


def test_the_readings_of_an_ab_are_no_results_of_their_own(tmp_path):
    half = bench(2, 9.0, run="ab-first-0A", metrics={"pair": 0.0}, **FUSED)
    broken = bench(3, None, run="ab-first-1A", metrics={"pair": 1.0}, **WRONG, **FUSED)
    found = content(tmp_path, bench(1, 2.0, **FUSED), half, broken)
    assert fused(found).latency_ms == 2.0 and found.problems == () == found.trends and found.records == 3


def test_a_profile_gives_the_traffic_and_never_takes_the_time_away(tmp_path):
    timed = bench(1, 2.0, flops=8.0, traffic_bytes=100.0, traffic_basis="modelled", least_bytes=50.0, **FUSED)
    profile = {"traffic_bytes": 80.0, "traffic_basis": "counted", "reason": "under ncu's clock", **FUSED}
    row = fused(content(tmp_path, timed, bench(2, None, run="r2-bbbbbbbb", **profile)))
    assert row.latency_ms == 2.0 and row.traffic == "counted"
    assert row.record.bytes_per_s == pytest.approx(80.0 / 2e-3) and "made.jsonl, line 2" in dict(row.facts)["traffic"]
    unlike = bench(2, None, run="r2-bbbbbbbb", commit=OLD, **profile)
    row = fused(content(tmp_path / "other", timed, unlike))
    assert row.traffic == "modelled", "another commit's kernel may move something else"


@pytest.mark.parametrize("latency", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_no_time_is_invalid_and_nothing_is_made_of_it(tmp_path, latency):
    record = replace(bench(1, 2.0, **LIBRARY), latency_median_ms=latency)
    found = content(tmp_path, record, bench(2, 1.0, **FUSED))
    library = rows(found)[KEY, "n=1", "library"]
    assert (library.latency_ms, library.status, fused(found).over_library) == (None, "INVALID", None)
    assert [problem["status"] for problem in found.problems] == ["INVALID"]


def test_an_interpreted_kernel_has_no_time_and_its_check_says_who_made_it(tmp_path):
    untimed = bench(1, None, status="UNSUPPORTED", reason="it runs in Triton's interpreter", device="cpu", **FUSED)
    error = ({"output": "c", "max_abs_error": 1.0, "max_error_over_tolerance": 0.25},)
    common = {"op": "my_op", "scheme": "fp32", "checked_by": "interpreter", "device": "cpu", **FUSED}
    right = make("check", 2, case_id="n=2", errors=error, weak=("c: zeros",), **common)
    wrong = make("check", 3, case_id="n=3", status="INCORRECT", reason="off", **common)
    absent = make("check", 4, case_id="n=4", status="UNAVAILABLE", reason="not here", **common)
    found = content(tmp_path, untimed, right, wrong, absent)
    (row,) = rows(found).values()
    assert row.latency_ms is None and not row.failed
    ((one,),) = (op["checks"] for op in found.ops)
    counts = [one[name] for name in ("right", "wrong", "not_run")]
    assert (one["kernel"], one["checked_by"], counts) == ("fused", "interpreter", [1, 1, 1])
    assert (one["worst"], one["weak"], one["source"].line) == (0.25, 1, 4)
    assert any(gap["names"] == ("my_op/fused",) and "interpreter" in gap["reason"] for gap in found.unmeasured)


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
    mean = pytest.approx(math.sqrt(4 * 0.25))
    assert standing["over_library"] == {"mean": mean, "low": 0.25, "high": 4.0, "cases": 2}
    assert (standing["slower_cases"], standing["over_naive"]) == (1, None)
    assert standing["kernels"] == ("fused", "packed")


def test_every_time_stands_in_the_line_that_it_names(whole):
    folder, found = whole
    timed = [(case, row) for (_, case, _), row in rows(found).items() if row.latency_ms is not None]
    for case, row in timed:
        root = folder if "synthetic" in row.source.file else CPU_RECORDS
        record = json.loads((root / Path(row.source.file).name).read_text().splitlines()[row.source.line - 1])
        shown = row.kernel, case, row.latency_ms, "OK"
        assert tuple(record[name] for name in ("kernel", "case_id", "latency_median_ms", "status")) == shown
    assert len(timed) > 100


def test_problems_come_with_their_reasons_and_the_verdicts_that_stop_a_merge(whole, tmp_path):
    found = {(problem["name"], problem["status"]): problem["reason"] for problem in whole[1].problems}
    assert found["gemm/hangs", "TIMEOUT"] == "no end after 60 s" and "in L2" in found["gemm/too_fast", "INVALID"]
    assert {status for name, status in found if "against" in name} == {"SLOWER", "INCORRECT", "MISSING"}
    assert whole[1].replaced_failures == 1
    none = content(tmp_path, make("ab", 1, op="my_op", case_id="n=1", scheme="bf16", **FUSED))
    assert [problem["status"] for problem in none.problems] == ["NO VERDICT"]


def test_what_nobody_measured_is_named(whole, tmp_path):
    gaps = whole[1].unmeasured
    assert any("epyc" in gap["machine"] and "gemm/tensor_core" in gap["names"] for gap in gaps)
    absent = next(gap for gap in gaps if gap["machine"] == KEY and gap["status"] == "NO RECORD")
    assert "rope/fused" in absent["names"] and "gemm/library" not in absent["names"]
    few = content(tmp_path, bench(1, 1.0, **FUSED)).unmeasured
    assert few[-1]["names"] == ("checks", "measured ceilings", "engine runs", "A/B verdicts", "compiled code")
    assert not any("my_op/fused" in gap["names"] for gap in few)


ROOFS = {"device": "d", "kind": "measured", "hbm_bytes_per_s": 1e12, "vector_flops_per_s": 1e12}
ROOFS["tensor_flops_per_s"] = {"bf16": 1e12}


def test_a_kernel_whose_work_nobody_knows_is_named_beside_the_roofline(tmp_path):
    """Also one that was timed in a smaller case than the one that is drawn."""
    given = {"ceilings": ROOFS, "bound_ms": 0.1, "least_bytes": 8.0}
    placed = bench(1, 1.0, flops=8.0, metrics={"cost_read_bytes": 8.0, "cost_vector_flops": 8.0}, **given, **FUSED)
    (drawing,) = content(tmp_path, placed, bench(2, 1.0, case="n=0", **given, **LIBRARY)).rooflines
    assert [point.label for point in drawing.points] == ["fused"]
    assert [name.partition(":")[0] for name in drawing.unplaced] == ["my_op/library"]


def test_more_bytes_a_second_than_the_roof_are_marked(tmp_path):
    given = {"ceilings": ROOFS, "least_bytes": 1.0}
    near, above = bench(1, 1.0, bytes_per_s=1.04e12, **given, **FUSED), bench(2, 1.0, bytes_per_s=1.2e12, **given)
    found = rows(content(tmp_path, near, replace(above, **LIBRARY)))
    assert not found[KEY, "n=1", "fused"].above_roof and found[KEY, "n=1", "library"].above_roof


def test_a_damaged_record_is_named_by_file_and_line(tmp_path):
    line = bench(1, 2.0, **FUSED).to_json()
    file = tmp_path / "made.jsonl"
    for changes, message in (
        ({"latency_median_ms": "fast"}, "latency_median_ms: expected a number"),
        ({"environment": {"gpu": "H200"}}, "environment.gpu: expected an object"),
        ({"ceilings": {"device": "x"}}, "ceilings, kind: expected a value"),
        ({"ceilings": {**ROOFS, "tensor_flops_per_s": [1e12]}}, "ceilings, tensor_flops_per_s: expected an object"),
        ({"ceilings": {**ROOFS, "hbm_bytes_per_s": 0.0}}, "ceilings: expected rates above 0, got 0.0"),
    ):
        file.write_text(f"{line}\n{json.dumps({**json.loads(line), **changes})}\n")
        with pytest.raises(ValueError, match=f"^made.jsonl, line 2: {message}"):
            load([tmp_path])
    file.write_text(line)
    with pytest.raises(ValueError, match=r"made\.jsonl, line 1: the last record is truncated"):
        load([tmp_path])


def test_files_are_found_at_any_depth_each_once_and_no_records_are_no_report(tmp_path):
    deep, line = tmp_path / "a" / "b", bench(1, 2.0, **FUSED).to_json()
    deep.mkdir(parents=True)
    for path in (tmp_path / "none", tmp_path, deep / "made.jsonl"):
        if path.suffix:
            path.write_text("\n")
        with pytest.raises(ValueError, match="^records: expected "):
            load([path])
    (deep / "made.jsonl").write_text(f"\n{line}\n")
    (tmp_path / "copy.jsonl").write_text(f"{line}\n")
    (tmp_path / "notes.txt").write_text("no record\n")
    assert len(find_files([tmp_path, deep, deep / "made.jsonl"])) == 2
    found, files = load([deep, tmp_path])
    assert [(item.source.line, item.source.file) for item in found] == [(2, "b/made.jsonl")], "the copy counts once"
    assert [file["records"] for file in files] == [1, 0]

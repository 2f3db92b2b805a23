"""Records to other tools' forms and back, bit for bit; other tools' files to records, and what is wrong with a file."""

import csv
import io
import json
import math
import subprocess
import sys

import pandas as pd
import pytest
from test_cli import rooflab  # noqa: F401  the fixture
from test_history import record

from rooflab.bench.exchange.commands import counted, export, read
from rooflab.bench.exchange.dashboards import write_bencher, write_github_action
from rooflab.bench.exchange.exported import benchmark_name
from rooflab.bench.exchange.imported import make_case, write_records
from rooflab.bench.exchange.pytest_benchmark_export import write_pytest_benchmark
from rooflab.bench.exchange.pytest_benchmark_json import read_pytest_benchmark
from rooflab.bench.exchange.table_csv import COLUMNS, read_csv, write_csv
from rooflab.bench.records import files as record_files
from rooflab.bench.records.record import Record
from rooflab.bench.records.samples import pack_samples
from rooflab.bench.report.trends.points import Chosen, read_points
from rooflab.reference.spec import Case

SAMPLES = [3.3e-6, 1.1e-6, 2.0000000000000004e-6, 5e-6, 2.2e-6]


def sampled(number=0, **changes):
    """A time with samples; its median is one that `median(samples) * 1e3` would miss by a bit."""
    samples = {"samples": pack_samples(SAMPLES), "sample_count": len(SAMPLES)}
    return record(number, math.nextafter(2.2e-3, 1), **(samples | changes))


def every_kind():
    """Records that use every sort of field."""
    failed = {"latency_median_ms": None, "latency_p20_ms": None, "latency_p80_ms": None, "basis": "bound"}
    errors = ({"output": "c", "max_abs_error": math.inf, "max_error_over_tolerance": 2.0},)
    return [
        sampled(
            config={"BLOCK": 64, "swap": True}, metrics={"gap": 0.1}, compiled=({"registers": 32},), weak=("c: zeros",)
        ),
        sampled(1, kernel='odd, "name"', scheme="", reason="", dirty=False, seed=0, commit="a" * 40),
        record(2, None, status="INCORRECT", reason="wrong,\nin two lines", errors=errors, **failed),
        Record(kind="engine", run_id="r9", status="OK", environment={"gpu": None}, metrics={"ttft_ms": 1e300}),
    ]


def test_csv_keeps_everything(tmp_path):
    records = every_kind()
    write_csv(records, tmp_path / "a.csv")
    assert list(read_csv(tmp_path / "a.csv").records) == records


@pytest.mark.filterwarnings("ignore:.*float_precision")  # the default of newer versions, needed by older ones
def test_pandas_reads_the_csv_back_equal(tmp_path):
    records = every_kind()
    write_csv(records, tmp_path / "a.csv")
    frame = pd.read_csv(tmp_path / "a.csv", float_precision="round_trip")
    assert tuple(frame.columns) == COLUMNS and len(frame) == len(records)
    medians = [None if math.isnan(value) else value for value in frame["latency_median_ms"]]
    assert medians == [each.latency_median_ms for each in records]
    assert json.loads(frame["environment"][0]) == dict(records[0].environment)
    assert frame["kernel"][1] == 'odd, "name"' and frame["status"].tolist() == [each.status for each in records]


def test_columns_of_the_csv_are_the_schema_s_in_its_order():
    assert COLUMNS[:4] == ("kind", "run_id", "status", "environment") and "latency_median_ms" in COLUMNS


def test_pytest_benchmark_json_keeps_medians_and_samples_bit_for_bit(tmp_path):
    records = [sampled(), sampled(1, kernel="naive")]
    assert write_pytest_benchmark(records, tmp_path / "a.json") == []
    back = read_pytest_benchmark(tmp_path / "a.json").records
    for one, other in zip(records, back, strict=True):
        for name in (
            "latency_median_ms",
            "latency_p20_ms",
            "latency_p80_ms",
            "samples",
            "sample_count",
            "op",
            "kernel",
        ):
            assert getattr(one, name) == getattr(other, name), name
        for name in ("case", "case_id", "scheme", "role", "backend", "device", "l2_state"):
            assert getattr(one, name) == getattr(other, name), name
        assert other.samples_s == SAMPLES and other.commit is None and other.checked_by == "none"
        assert other.timer == "imported: pytest-benchmark, cuda events"
        assert other.environment["machine_key"] == one.environment["machine_key"]
        assert other.environment["imported"]["tool"] == "pytest-benchmark"


def test_pytest_benchmark_compare_reads_the_json(tmp_path):
    for number, factor in ((1, 1), (2, 2)):
        scaled = [sampled(samples=pack_samples([factor * sample for sample in SAMPLES])), sampled(1, kernel="naive")]
        write_pytest_benchmark(scaled, tmp_path / "machine" / f"000{number}_run.json")
    command = [
        sys.executable,
        "-m",
        "pytest_benchmark",
        "--storage",
        str(tmp_path),
        "compare",
        "--columns=median,rounds",
    ]
    done = subprocess.run([*command, "0001", "0002"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gemm M=64 bf16" in done.stdout and "test_kernel[gemm/packed-M=64-bf16] (0002_run)" in done.stdout
    assert "4.4000 (2.00)" in done.stdout, "the second run is twice as slow, in us"


def test_what_a_form_has_no_place_for_is_listed(tmp_path):
    skipped = write_pytest_benchmark([*every_kind(), record(5, 1.0)], tmp_path / "a.json")
    reasons = [each.reason for each in skipped]
    assert reasons == [
        "INCORRECT: wrong,\nin two lines",
        "of kind engine, not bench",
        "it has no samples and no statistics",
    ]
    assert counted(skipped + skipped[:1])[0] == (reasons[0], 2)
    for write in (write_pytest_benchmark, write_github_action, write_bencher):
        with pytest.raises(ValueError, match="^records: expected a bench record with a latency, got none among 1"):
            write(every_kind()[2:3], tmp_path / "none")
        with pytest.raises(ValueError, match="^machine: expected records of one, got .*another"):
            write([sampled(), sampled(1, environment={"machine_key": "another"})], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_dashboards_forms(tmp_path):
    records = [sampled(), sampled(2, latency_median_ms=0.5, latency_p20_ms=None)]
    write_github_action(records, tmp_path / "gh.json")
    first, second = json.loads((tmp_path / "gh.json").read_text())
    assert (first["name"], first["unit"]) == ("gemm/packed M=64 bf16", "ms")
    assert first["value"] == records[0].latency_median_ms and " - " in first["range"] and "range" not in second
    (older,) = write_bencher(records, tmp_path / "bmf.json")
    found = json.loads((tmp_path / "bmf.json").read_text())
    assert older.reason == "an older record of the same name" and benchmark_name(records[0]) == older.place
    assert found == {
        "gemm/packed M=64 bf16": {
            "latency": {"value": 5e5, "upper_value": found[older.place]["latency"]["upper_value"]}
        }
    }


def foreign(**changes):
    """A file of pytest-benchmark as a stranger's suite writes it."""
    stats = {"min": 1e-3, "max": 3e-3, "mean": 2e-3, "stddev": 1e-4, "median": 2e-3, "iqr": 1e-4, "rounds": 5}
    benchmark = {"name": "test_sort[100-a,b=1]", "fullname": "t.py::test_sort[100-a,b=1]", "group": None}
    benchmark |= {"params": {"n": 100, "how": "a,b=1"}, "extra_info": {"status": "flaky"}, "options": {}}
    benchmark |= {"stats": stats | {"iterations": 1, "total": 1e-2}}
    machine = {"node": "my-secret-host", "machine": "x86_64", "system": "Linux", "python_version": "3.12.1"}
    machine["cpu"] = {"brand_raw": "AMD EPYC", "count": 8}
    values = {"machine_info": machine, "commit_info": {"id": "c" * 40, "dirty": True, "project": "theirs"}}
    values |= {"benchmarks": [benchmark], "datetime": "2026-02-03T04:05:06.789012+00:00", "version": "5.1.0"}
    return values | changes


def written(path, values):
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def test_a_stranger_s_benchmarks_without_samples(tmp_path):
    (found,) = read_pytest_benchmark(written(tmp_path / "a.json", foreign())).records
    assert (found.op, found.kernel, dict(found.case)) == ("test_sort", "test_sort", {"n": 100, "how": "a;b:1"})
    assert Case.parse(found.case_id) == Case(**found.case), "its case can be named on the command line"
    assert (found.latency_median_ms, found.samples, found.status) == (2.0, None, "OK")
    assert found.metrics["mean_s"] == 2e-3 and found.metrics["rounds"] == 5
    assert found.timestamp == "2026-02-03T04:05:06+00:00" and found.commit is None
    assert found.environment["imported"]["commit"] == "c" * 40
    assert found.environment["machine_key"].startswith("imported-amd-epyc-")
    assert "my-secret-host" not in found.to_json()
    assert write_pytest_benchmark([found], tmp_path / "b.json") == [], "its statistics are enough to write it again"
    assert read_pytest_benchmark(tmp_path / "b.json").records[0].metrics == found.metrics


def test_the_suite_of_kernels_is_known_by_its_names(tmp_path):
    values = foreign()
    values["benchmarks"][0] |= {"name": "test_kernel[gemm/naive-M=2,layout=NT]", "params": {"kernel": "Kernel(...)"}}
    values["benchmarks"][0]["extra_info"] = {"timer": "cuda events", "l2_state": "cold", "status": "INVALID: too fast"}
    (found,) = read_pytest_benchmark(written(tmp_path / "a.json", values)).records
    assert (found.op, found.kernel, dict(found.case)) == ("gemm", "naive", {"M": 2, "layout": "NT"})
    assert (found.status, found.reason, found.l2_state) == ("INVALID", "too fast", "cold")


def test_a_benchmark_that_failed_is_listed(tmp_path):
    values = foreign()
    values["benchmarks"].append({"name": "t", "fullname": "t.py::t", "stats": None})
    found = read_pytest_benchmark(written(tmp_path / "a.json", values))
    assert (
        len(found.records) == 1 and found.skipped[0].place == "t.py::t" and "no statistics" in found.skipped[0].reason
    )


def without(values, key):
    return {name: value for name, value in values.items() if name != key}


def stats_of(**changes):
    values = foreign()
    values["benchmarks"][0]["stats"] |= changes
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ('{"machine_info": {}\n, }', "^a.json, line 2 column 3: not JSON: "),
        ("[]", "^a.json: expected an object, got list"),
        (without(foreign(), "benchmarks"), "^a.json: expected 'benchmarks', got an object without it"),
        (foreign(benchmarks={}), "^a.json: expected 'benchmarks' as list, got dict"),
        (foreign(datetime="yesterday"), "^a.json, datetime: expected a time in ISO 8601, got 'yesterday'"),
        (stats_of(median="fast"), r"^a.json, benchmarks\[0\].stats: expected 'median' as int or float, got str"),
        (stats_of(median=True), r"^a.json, benchmarks\[0\].stats: expected 'median' as int or float, got bool"),
        (stats_of(median=-1.0), r"^a.json, benchmarks\[0\].stats.median: expected a finite number above 0, got -1.0"),
        (stats_of(data=["x"]), r"^a.json, benchmarks\[0\].stats.data: expected a list of numbers"),
    ],
)
def test_a_malformed_json_is_one_sentence_with_its_place(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        read_pytest_benchmark(written(tmp_path / "a.json", values))


def test_a_malformed_csv_is_one_sentence_with_its_place(tmp_path):
    write_csv([sampled()], tmp_path / "a.csv")
    lines = (tmp_path / "a.csv").read_text()
    broken = {
        lines.replace("bench,r000", 'bench,"r000'): "^a.csv, line 2: not CSV",
        lines.rstrip("\n") + ",extra\n": "^a.csv, line 2: expected [0-9]+ cells",
        lines.replace("0.0022000000000000006", "fast"): "^a.csv, line 2, latency_median_ms, column 1: not JSON",
        lines.replace(",OK,", ",FINE,"): "^a.csv, line 2: status: expected one of OK",
        lines.splitlines(keepends=True)[0]: "^a.csv: expected a row of column names",
    }
    for text, message in broken.items():
        assert text != lines
        with pytest.raises(ValueError, match=message):
            read_csv(written(tmp_path / "a.csv", text))
    with pytest.raises(ValueError, match="^none.csv: expected a file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"kind\xff")
    with pytest.raises(ValueError, match="^b.csv, byte 4: expected UTF-8"):
        read_csv(tmp_path / "b.csv")


def test_an_import_is_kept_once_and_makes_a_history(tmp_path):
    found = read("pytest-benchmark", [written(tmp_path / "a.json", foreign())]).imported
    (path,) = write_records(found.records, tmp_path / "out")
    assert path.name.startswith("20260203T040506Z-") and record_files.read(path) == list(found.records)
    assert len(read_points([tmp_path / "out"]).frame) == 1
    with pytest.raises(ValueError, match=f"^out: {path.name} is there already"):
        write_records(found.records, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [path.name]


def test_a_case_from_anywhere_can_be_parsed():
    case = make_case({"a b": 1, "1st": "x=1,2", "none": None, "flag": True})
    assert case.id == "a_b=1,_1st=x:1;2,none=None,flag=true" and Case.parse(case.id) == case


def test_unknown_tools_and_forms_are_refused(tmp_path):
    with pytest.raises(ValueError, match="^tool: expected one of pytest-benchmark, .*got 'asv'"):
        read("asv", [tmp_path])
    with pytest.raises(ValueError, match="^form: expected one of pytest-benchmark, .*got 'asv'"):
        export("asv", [tmp_path], tmp_path / "a", Chosen())


def test_the_command_line_imports_and_exports(rooflab, tmp_path):  # noqa: F811
    written(tmp_path / "a.json", foreign())
    status, out, _ = rooflab("import", "pytest-benchmark", "a.json", "--out", "kept", "--json")
    assert status == 0 and json.loads(out)["rows"][0]["latency_ms"] == 2.0 and len(json.loads(out)["written"]) == 1
    record_files.write(tmp_path / "kept" / "ours.jsonl", sampled(), *every_kind()[2:])
    status, out, _ = rooflab("export", "csv", "kept", "--to", "a.csv")
    assert status == 0 and out == "4 records: a.csv\n"
    assert len(list(csv.reader(io.StringIO((tmp_path / "a.csv").read_text())))) == 5
    status, out, _ = rooflab("export", "bencher", "kept", "--to", "b.json", "--machine", "h200", "--json")
    assert status == 0 and json.loads(out)["records"] == 1 and len(json.loads(out)["left_out"]) == 1
    assert rooflab("import", "pytest-benchmark", "none.json")[0] == 2


def test_what_was_imported_can_be_compared(rooflab, tmp_path):  # noqa: F811
    for name, minute in (("a", "05"), ("b", "06")):
        written(tmp_path / f"{name}.json", foreign(datetime=f"2026-02-03T04:{minute}:06+00:00"))
        assert rooflab("import", "pytest-benchmark", f"{name}.json", "--out", name)[0] == 0
    status, out, _ = rooflab("ab", "--records", "a", "--records", "b", "--json")
    assert status == 0 and "test_sort/test_sort n=100,how=a;b:1" in out

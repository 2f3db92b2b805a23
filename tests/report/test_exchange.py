"""Records to pytest-benchmark's form and back, bit for bit; other tools' files to records; faults of a file."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, fields, replace

import pandas as pd
import pytest
from test_history import record

from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.exchange.commands import export, read
from rooflab.bench.exchange.files import make_case, write_csv, write_records
from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark, write_pytest_benchmark
from rooflab.bench.exchange.tritonbench import read_tritonbench
from rooflab.bench.plugin.timing import Timed, extra_info
from rooflab.bench.report.figures import as_ceilings, cost_of
from rooflab.bench.report.trends.points import RecordFilter, read_points
from rooflab.reference.spec import Case
from rooflab.roofline.model import Ceilings, Cost

SAMPLES = [3.3e-6, 1.1e-6, 2.0000000000000004e-6, 5e-6, 2.2e-6]


def sampled(number=0, **changes):
    """A time with samples; its median is one that `median(samples) * 1e3` would miss by a bit."""
    samples = {"samples": Record.packed(SAMPLES), "sample_count": len(SAMPLES)}
    samples |= {"latency_p20_ms": 2.1e-3, "latency_p80_ms": 2.3e-3}
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


@pytest.mark.filterwarnings("ignore:.*float_precision")  # the default of newer versions, needed by older ones
def test_pandas_reads_the_csv_back_equal(tmp_path):
    records = every_kind()
    write_csv(records, tmp_path / "a.csv")
    frame = pd.read_csv(tmp_path / "a.csv", float_precision="round_trip")
    assert tuple(frame.columns) == tuple(field.name for field in fields(Record)) and len(frame) == len(records)
    medians = [None if math.isnan(value) else value for value in frame["latency_median_ms"]]
    assert medians == [each.latency_median_ms for each in records]
    assert json.loads(frame["environment"][0]) == dict(records[0].environment)
    assert frame["kernel"][1] == 'odd, "name"' and frame["status"].tolist() == [each.status for each in records]


def test_pytest_benchmark_json_keeps_medians_and_samples_bit_for_bit(tmp_path):
    records = [sampled(), sampled(1, kernel="naive")]
    assert write_pytest_benchmark(records, tmp_path / "a.json") == []
    back = read_pytest_benchmark(tmp_path / "a.json").records
    for one, other in zip(records, back, strict=True):
        kept = ("case", "case_id", "scheme", "role", "backend", "device", "l2_state", "samples", "sample_count", "op")
        for name in (*kept, "kernel", "latency_median_ms", "latency_p20_ms", "latency_p80_ms"):
            assert getattr(one, name) == getattr(other, name), name
        assert other.samples_s == SAMPLES and other.commit is None and other.checked_by == "none"
        assert other.timer == "imported: pytest-benchmark, cuda events"
        assert other.environment["machine_key"] == one.environment["machine_key"]
        assert other.environment["imported"]["tool"] == "pytest-benchmark"


def test_pytest_benchmark_compare_reads_the_json(tmp_path):
    for number, factor in ((1, 1), (2, 2)):
        scaled = [sampled(samples=Record.packed([factor * sample for sample in SAMPLES])), sampled(1, kernel="naive")]
        write_pytest_benchmark(scaled, tmp_path / "machine" / f"000{number}_run.json")
    storage = ("--storage", str(tmp_path), "compare", "--columns=median,rounds", "--group-by=group,param:kernel")
    command = [sys.executable, "-m", "pytest_benchmark", *storage]
    done = subprocess.run([*command, "0001", "0002"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(f"'gemm M=64 bf16 kernel={name}': 2 tests" in done.stdout for name in ("packed", "naive"))
    assert "test_kernel[gemm/packed-M=64-bf16] (0002_run)" in done.stdout
    assert "4.4000 (2.00)" in done.stdout, "the second run is twice as slow, in us"


def test_an_export_has_each_name_once(tmp_path):
    searched = [sampled(3, config={"BLOCK": size}, latency_median_ms=ms) for size, ms in ((1, 3.0), (2, 1.0), (3, 2.0))]
    older, newer = [sampled(number, scheme="fp16", latency_median_ms=float(number)) for number in (1, 2)]
    skipped = write_pytest_benchmark([newer, *searched, older], tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())["benchmarks"]
    assert [each["extra_info"]["rooflab"]["latency_median_ms"] for each in found] == [2.0, 1.0], "newest, and fastest"
    assert [each.reason for each in skipped] == ["another run or config of its name is written"] * 3
    several = [sampled(device="cuda"), sampled(1, device="cpu")]
    with pytest.raises(ValueError, match=r"^machine: expected records of one, .* \(cpu\)"):
        write_pytest_benchmark(several, tmp_path / "none")


def test_what_a_form_has_no_place_for_is_listed(tmp_path):
    skipped = write_pytest_benchmark([*every_kind(), record(5, 1.0)], tmp_path / "a.json")
    reasons = [each.reason for each in skipped]
    assert reasons == ["INCORRECT: wrong,\nin two lines", "of kind engine, not bench", "it has no samples"]
    with pytest.raises(ValueError, match="^records: expected a bench record with a latency, got none among 1"):
        write_pytest_benchmark(every_kind()[2:3], tmp_path / "none")
    with pytest.raises(ValueError, match="^machine: expected records of one, with samples, got .*another"):
        write_pytest_benchmark([sampled(), sampled(1, environment={"machine_key": "another"})], tmp_path / "none")
    with pytest.raises(ValueError, match="^records: expected at least one, got none"):
        write_csv([], tmp_path / "none")
    assert not (tmp_path / "none").exists()


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
    assert (found.op, found.kernel, found.case_id) == ("test_sort", "t.py::test_sort", "n=100,how=a%2Cb%3D1")
    assert Case.parse(found.case_id) == Case(**found.case), "its case can be named on the command line"
    assert (found.latency_median_ms, found.samples, found.status) == (2.0, None, "OK")
    assert found.metrics["mean_s"] == 2e-3 and found.metrics["rounds"] == 5
    assert found.timestamp == "2026-02-03T04:05:06+00:00"
    assert (found.commit, found.dirty) == ("c" * 40, True), "the commit of what was measured"
    without_git = foreign(commit_info={"id": "unversioned", "dirty": False})
    (other,) = read_pytest_benchmark(written(tmp_path / "no.json", without_git)).records
    assert (other.commit, other.dirty) == (None, None)
    assert found.environment["machine_key"].startswith("imported-amd-epyc-")
    assert "my-secret-host" not in found.to_json()
    larger = foreign()
    larger["machine_info"]["cpu"]["count"] = 64
    (other,) = read_pytest_benchmark(written(tmp_path / "larger.json", larger)).records
    assert other.environment["machine_key"] != found.environment["machine_key"], "of the same CPU, with more cores"
    with pytest.raises(ValueError, match="^machine: expected records of one, with samples, got none"):
        write_pytest_benchmark([found], tmp_path / "b.json")


def test_the_suite_of_kernels_is_known_by_its_names_and_a_failed_benchmark_is_listed(tmp_path):
    values = foreign()
    name = "test_kernel[gemm/naive-M=2,layout=NT]"
    names = {"name": name, "fullname": f"bench/bench_kernels.py::{name}", "params": {"kernel": "Kernel(...)"}}
    values["benchmarks"][0] |= names
    values["benchmarks"][0]["extra_info"] = {"timer": "cuda events", "l2_state": "cold", "status": "INVALID: too fast"}
    values["benchmarks"].append({"name": "t", "fullname": "t.py::t", "stats": None})
    read = read_pytest_benchmark(written(tmp_path / "a.json", values))
    (found,), (skipped,) = read.records, read.skipped
    assert (found.op, found.kernel, dict(found.case)) == ("gemm", "naive", {"M": 2, "layout": "NT"})
    assert (found.status, found.reason, found.l2_state) == ("INVALID", "too fast", "cold")
    assert found.scheme is None and "benchmark" not in found.environment["imported"]
    values["benchmarks"][0] |= {"fullname": "bench/bench_kernels.py::test_kernel[gemm/naive-M=2,eps=1e-06-bf16]"}
    (found,) = read_pytest_benchmark(written(tmp_path / "scheme.json", values)).records
    assert (found.case_id, found.scheme) == ("M=2,eps=1e-06", "bf16")
    values["benchmarks"][0] |= {"fullname": f"mine.py::{name}", "group": None}
    (found,) = read_pytest_benchmark(written(tmp_path / "mine.json", values)).records
    assert (found.op, found.kernel) == ("test_kernel", "mine.py::test_kernel"), "a test of another file"
    values["benchmarks"][0]["extra_info"]["status"] = "NOISY: busy"
    (found,) = read_pytest_benchmark(written(tmp_path / "b.json", values)).records
    assert (found.status, found.reason) == ("NOISY", "busy")
    assert skipped.place == "t.py::t" and "no statistics" in skipped.reason


def without(values, key):
    return {name: value for name, value in values.items() if name != key}


def stats_of(**changes):
    values = foreign()
    values["benchmarks"][0]["stats"] |= changes
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ('{"machine_info": {}\n; }', "^a.json, line 2 column 1: not JSON: "),
        ("[]", "^a.json: expected an object, got list"),
        (without(foreign(), "benchmarks"), "^a.json: expected 'benchmarks', got an object without it"),
        (foreign(benchmarks={}), "^a.json: expected 'benchmarks' as list, got dict"),
        (foreign(datetime="yesterday"), "^a.json, datetime: expected a time in ISO 8601, got 'yesterday'"),
        (stats_of(median="fast"), r"^a.json, benchmarks\[0\].stats: expected 'median' as int or float, got str"),
        (stats_of(median=True), r"^a.json, benchmarks\[0\].stats: expected 'median' as int or float, got bool"),
        (stats_of(data=[10**400, "x"]), r"^a.json, benchmarks\[0\].stats.data: expected a list of numbers"),
    ],
)
def test_a_malformed_json_is_one_sentence_with_its_place(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        read_pytest_benchmark(written(tmp_path / "a.json", values))


def test_an_import_is_kept_once_and_makes_a_history(tmp_path):
    found = read("pytest-benchmark", [written(tmp_path / "a.json", foreign())])
    (path,) = write_records(found.records, tmp_path / "out")
    assert path.name.startswith("20260203T040506Z-") and record_files.read(path) == list(found.records)
    assert len(read_points([tmp_path / "out"]).frame) == 1
    with pytest.raises(ValueError, match=f"^out: {path.name} is there already"):
        write_records(found.records, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [path.name]


def test_a_case_from_anywhere_can_be_parsed_and_unknown_tools_and_forms_are_refused(tmp_path):
    case = make_case({"a b": 1, "1st": "x=1,2", "none": None, "flag": True})
    assert case.id == "a_b=1,_1st=x%3D1%2C2,none=None,flag=true" and Case.parse(case.id) == case
    assert make_case({"a b": 1, "a_b": 2}).id == "a_b=1,a_b_=2" and make_case({"a": "%2C"}) != make_case({"a": ","})
    with pytest.raises(ValueError, match="^tool: expected one of pytest-benchmark, .*got 'asv'"):
        read("asv", [tmp_path])
    with pytest.raises(ValueError, match="^form: expected one of pytest-benchmark, .*got 'asv'"):
        export("asv", [tmp_path], tmp_path / "a", RecordFilter())


def test_the_command_line_imports_and_exports(rooflab, tmp_path):
    written(tmp_path / "a.json", foreign())
    status, out, _ = rooflab("import", "pytest-benchmark", "a.json", "--out", "kept", "--json")
    assert status == 0 and json.loads(out)["rows"][0]["latency_ms"] == 2.0 and len(json.loads(out)["written"]) == 1
    record_files.write(tmp_path / "kept" / "ours.jsonl", sampled(), *every_kind()[2:])
    status, out, _ = rooflab("export", "csv", "kept", "--to", "a.csv")
    assert status == 0 and out == "4 records: a.csv\n"
    assert len(pd.read_csv(tmp_path / "a.csv")) == 4
    status, out, _ = rooflab("export", "pytest-benchmark", "kept", "--to", "b.json", "--machine", "h200", "--json")
    assert status == 0 and json.loads(out)["records"] == 1 and len(json.loads(out)["left_out"]) == 1
    assert rooflab("import", "pytest-benchmark", "none.json")[0] == 2


def test_what_was_imported_can_be_compared(rooflab, tmp_path):
    for name, minute in (("a", "05"), ("b", "06")):
        written(tmp_path / f"{name}.json", foreign(datetime=f"2026-02-03T04:{minute}:06+00:00"))
        assert rooflab("import", "pytest-benchmark", f"{name}.json", "--out", name)[0] == 0
    status, out, _ = rooflab("ab", "--records", "a", "--records", "b", "--json")
    assert status == 13 and "t.py::test_sort[100-a,b=1]" in out and "1 pairs: fewer than 5" in out
    other = foreign(datetime="2026-02-03T04:07:06+00:00", commit_info={"id": "d" * 40, "dirty": False})
    assert rooflab("import", "pytest-benchmark", written(tmp_path / "c.json", other), "--out", "b")[0] == 0
    status, _, err = rooflab("ab", "--records", "a", "--records", "b")
    assert status == 2 and f"expected one commit in b, got {'c' * 10} and changes, {'d' * 10} of t.py::test_sort" in err
    assert sorted(set(read_points([tmp_path / "b"]).frame["commit"])) == ["c" * 40, "d" * 40]


ROOF = Ceilings("NVIDIA H100 80GB HBM3", "datasheet", 3.35e12, {"bf16": 989e12}, 67e12)


def priced(name, cost, median_s, gpu="NVIDIA H100 80GB HBM3", status="OK", reason=""):
    """A file of pytest-benchmark with one test that gave the fixture a cost, and values as the plugin writes them."""
    values = foreign(benchmarks=[named(f"tests/test_mine.py::{name}", median_s)])
    values["machine_info"]["rooflab"] = {"machine_key": "h100-1", "gpu": {"name": gpu}}
    environment = {"machine_key": "h100-1", "gpu": {"name": gpu}}
    record = Record(
        kind="bench", run_id="r", status=status, reason=reason, environment=environment, device="cuda",
        timer="cuda events", basis="measured", latency_median_ms=median_s * 1e3, ceilings=asdict(ROOF),
    )  # fmt: skip
    values["benchmarks"][0]["extra_info"] = extra_info(Timed(record, "", None, None), cost)
    return values


def test_a_roofline_is_drawn_of_the_json_of_ones_own_tests(rooflab, tmp_path):
    cost, moving = Cost(1e9, 1e9, {"bf16": 1e12}), Cost(1e9, 1e9)
    values = priced("test_product[a-very-long-name-of-a-parameter]", cost, 2e-3)
    values["benchmarks"] += priced("test_copy", moving, 1e-3)["benchmarks"]
    values["benchmarks"] += priced("test_busy", moving, 1e-3, status="NOISY", reason="busy")["benchmarks"]
    registers = priced("test_registers", Cost(0.0, 0.0, {"bf16": 1e9}), 1e-3)
    values["benchmarks"] += foreign()["benchmarks"] + registers["benchmarks"]
    product, copy, busy, plain, _ = read_pytest_benchmark(written(tmp_path / "b.json", values)).records
    assert (product.flops, product.least_bytes, product.limiter) == (1e12, 2e9, "tensor")
    assert product.bound_ms == pytest.approx(1e15 / 989e12) and product.bound_fraction == product.bound_ms / 2
    assert copy.limiter == "memory" and copy.flops_per_s == 0 and as_ceilings(copy.ceilings) == ROOF
    assert cost_of(product) == cost and cost_of(busy) == moving and cost_of(plain) is busy.bound_ms is None
    for words in (("b.json",), ("b.json", "--gpu", "h100"), ("kept", "--gpu", "h100")):
        if words[0] == "kept":
            assert rooflab("import", "pytest-benchmark", "b.json", "--out", "kept")[0] == 0
        status, out, err = rooflab("roofline", *words, "--out", "x.svg", "--json")
        points = {point["op"]: point for point in json.loads(out)["points"]}
        assert [name.rpartition("::")[2] for name in json.loads(out)["without_bytes"]] == ["test_registers"]
        assert status == 0 and points["test_product"]["seconds"] == 2e-3, err
        assert points["test_product"]["dtype"] == "bf16" and points["test_product"]["role"] == "benchmark"
        assert ("test_busy" in points) == ("--gpu" in words), "a bound needs no time"
        drawn = (tmp_path / "x.svg").read_text()
        assert "roofline" in drawn and list(tmp_path.glob("*.png")) == []
    status, out, err = rooflab("report", "kept", "--out", "r.html")
    page = (tmp_path / "r.html").read_text()
    assert status == 0 and ", 1 roofline" in out and page.count("<img ") == 1 and "test_copy" in page, err
    written(tmp_path / "other.json", priced("test_copy", moving, 1e-3, gpu="NVIDIA A100"))
    status, out, err = rooflab("roofline", "other.json", "--gpu", "h100", "--out", "y.png", "--json")
    assert status == 0 and json.loads(out)["points"][0]["seconds"] is None
    assert "was measured on NVIDIA H100 SXM5 80 GB (its records name NVIDIA A100), so these are bounds" in err
    status, _, err = rooflab("roofline", written(tmp_path / "plain.json", foreign()), "--gpu", "h100")
    assert status == 2 and "expected records of the emulator, or benchmarks with a cost" in err
    del values["benchmarks"][0]["extra_info"]["bound_s"]
    with pytest.raises(ValueError, match=r"^a.json, benchmarks\[0\].extra_info: expected the values of "):
        read_pytest_benchmark(written(tmp_path / "a.json", values))


def named(fullname, median_s=2e-3, group=None, **params):
    """One benchmark of a file, with the names and parameters that pytest-benchmark gives it."""
    name = fullname.rpartition("::")[2]
    test_id = name.partition("[")[2].removesuffix("]") or None
    (found,) = stats_of(median=median_s, data=[median_s] * 5)["benchmarks"]
    return found | {"fullname": fullname, "name": name, "group": group, "params": params or None, "param": test_id}


def of_one_name(changes):
    """Eight benchmarks whose names are six, whose texts are three, and whose objects and groups are of this run."""
    at = f"UNSERIALIZABLE[<Kernel at {id(changes):#x}>]"
    parameters = [{"group": str(changes)}, {}, {}, {}, {"n": 1}, {"n": "1"}, {"k": at}, {"k": [at]}]
    names = ["a.py::test_x", "b.py::test_x", "a.py::One::test_y", "a.py::Two::test_y"]
    names += [f"a.py::test_z[{test_id}]" for test_id in ("1_0", "1_1")] + [f"a.py::test_k[k{n}]" for n in (0, 1)]
    tests = zip(names, changes, parameters, strict=True)
    return [named(name, 2e-3 * change, **given) for name, change, given in tests]


def test_benchmarks_of_one_name_are_not_one(rooflab, tmp_path):
    changes = (2, 0.5) * 4
    for name, minute, factors in (("a", "05", (1,) * 8), ("b", "06", changes)):
        time = f"2026-02-03T04:{minute}:06+00:00"
        written(tmp_path / f"{name}.json", foreign(datetime=time, benchmarks=of_one_name(factors)))
        assert rooflab("import", "pytest-benchmark", f"{name}.json", "--out", name)[0] == 0
    _, out, _ = rooflab("ab", "--records", "a", "--records", "b", "--json")
    (outcomes,) = json.loads(out)["tables"].values()
    assert [1 + each["effect"] for each in outcomes] == pytest.approx(changes)
    assert len({each["key"] for each in outcomes}) == 8 and len(read_points([tmp_path / "a"]).frame) == 8
    assert [each["key"] for each in outcomes] == [each["fullname"] for each in of_one_name(changes)], "pytest's ids"


def test_the_case_is_the_parameters_and_the_tests_id_where_it_says_more(tmp_path):
    tests = {
        "t[up-1]": {"how": "up", "n": 1},
        "t[True]": {"flag": True},
        "t[true]": {"flag": "true"},
        "t[small]": {"n": 1},
        "t[k0-1]": {"k": ["UNSERIALIZABLE[<Kernel at 0x7f>]"], "n": 1},
        "d[1]/t.py::t": {},
    }
    benchmarks = [named(f"{'' if '::' in name else 't.py::'}{name}", **params) for name, params in tests.items()]
    found = read_pytest_benchmark(written(tmp_path / "a.json", foreign(benchmarks=benchmarks))).records
    cases = ["how=up,n=1", "flag=true", "flag=true,id=true", "n=1,id=small", "n=1,id=k0-1", ""]
    assert [each.case_id for each in found] == cases
    assert [each.kernel for each in found] == ["t.py::t"] * 5 + ["d[1]/t.py::t"]


@pytest.mark.parametrize("median_s", [0, -1.0, math.nan, math.inf, 10**400])
def test_a_median_or_sample_that_is_no_time_makes_one_benchmark_invalid_and_not_the_file(rooflab, tmp_path, median_s):
    first, second, third = named("t.py::a", median_s), named("t.py::b"), named("t.py::c")
    third["stats"] |= {"data": [1e-3, -median_s, 1e-3], "mean": median_s}
    values = foreign(benchmarks=[first, second, third])
    first, second, third = read_pytest_benchmark(written(tmp_path / "a.json", values)).records
    assert (first.status, first.latency_median_ms, second.status) == ("INVALID", None, "OK")
    assert first.reason == f"a latency of {float('inf') if median_s == 10**400 else median_s * 1e3:g} ms"
    if median_s and not -1 <= median_s < 0:
        assert third.status == "INVALID" and third.reason.startswith("a sample of ") and "mean_s" not in third.metrics
    assert third.samples is None or "nan" not in third.to_json()
    record_files.write(tmp_path / "a" / "a.jsonl", first, second)
    record_files.write(tmp_path / "b" / "b.jsonl", *(replace(each, run_id="r2") for each in (first, second)))
    status, out, _ = rooflab("ab", "--records", "a", "--records", "b", "--json")
    (outcomes,) = json.loads(out)["tables"].values()
    assert status == 13 and [each["verdict"] for each in outcomes] == ["INVALID", "UNRESOLVED"]


def test_names_groups_and_parameters_of_an_import_come_back_in_an_export(tmp_path):
    benchmarks = [
        named("t.py::A::test_x[k0-1]", k="UNSERIALIZABLE[<Kernel at 0x7f>]", n=1),
        named("t.py::y", group="g"),
    ]
    found = read_pytest_benchmark(written(tmp_path / "a.json", foreign(benchmarks=benchmarks))).records
    assert write_pytest_benchmark(found, tmp_path / "b.json") == []
    again = json.loads((tmp_path / "b.json").read_text())["benchmarks"]
    names = ("group", "name", "fullname", "params", "param")
    assert [[each[name] for name in names] for each in again] == [[each[name] for name in names] for each in benchmarks]
    back = read_pytest_benchmark(tmp_path / "b.json").records
    assert [(each.op, each.kernel, each.case_id) for each in back] == [(e.op, e.kernel, e.case_id) for e in found]
    assert [each.environment["imported"]["benchmark"]["group"] for each in back] == [None, "g"]


CSV = """\
(M, N, K);flops;aten-latency;aten-tflops;aten-accuracy;triton-latency;triton-tflops;triton-accuracy
(256, 128, 64);4194304;0.02;0.2;;0.016 (±3.10%);0.25;1.0
(512, 128, 64);8388608;0.03;0.3;;CUDA out of memory.;;
(512, 256, 64);16777216;0.03;0.3;;0.01;0.4;0.0
(64, 64, 64);524288;;0.1;;RuntimeError: no kernel;;
average;;0.026;0.2;;0.013;0.3;
"""


def csv_file(tmp_path, text=CSV, name="op_gemm_a1b2c3.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_rows_become_records_by_implementation_and_what_is_none_is_listed(tmp_path):
    path = csv_file(tmp_path)
    os.utime(path, (1.7e9, 1.7e9))
    found = read_tritonbench(path)
    first = found.records[0]
    assert (first.op, first.kernel, first.case_id) == ("gemm", "aten", "M=256,N=128,K=64")
    assert (first.latency_median_ms, first.flops_per_s, first.timer) == (0.02, 0.2e12, "imported: tritonbench")
    assert first.timestamp == "2023-11-14T22:13:20+00:00", "the file's time: the format says nothing of when"
    assert Case.parse(first.case_id) == Case(**first.case) and first.commit is None
    second = found.records[1]
    assert (second.kernel, second.latency_median_ms, second.metrics) == ("triton", 0.016, {"accuracy": 1.0})
    failed = {(each.status, each.case_id, each.reason) for each in found.records if each.status != "OK"}
    assert failed == {
        ("OUT_OF_MEMORY", "M=512,N=128,K=64", "CUDA out of memory."),
        ("INCORRECT", "M=512,N=256,K=64", "tritonbench found its result to differ from the baseline's"),
        ("RUNTIME_ERROR", "M=64,N=64,K=64", "RuntimeError: no kernel"),
    }
    assert all(each.latency_median_ms is None for each in found.records if each.status != "OK")
    assert {each.place: each.reason for each in found.skipped} == {
        "op_gemm_a1b2c3.csv, line 6": "an average over inputs of different sizes",
        "op_gemm_a1b2c3.csv, line 5, aten": "it has no latency, only tflops",
    }
    assert len(found.records) == 7, "8 cells of a latency, one of them empty"


def test_numbers_are_read_as_they_are_written_or_named(tmp_path):
    text = "x;a-latency;a-speedup;a-tflops\n1;1,234.5 (±3.10%);nan;1,000\n2;nan;;\n"
    found = read_tritonbench(csv_file(tmp_path, text))
    assert [(each.latency_median_ms, each.flops_per_s) for each in found.records] == [(1234.5, 1e15), (None, None)]
    other = read_pytest_benchmark(written(tmp_path / "b.json", stats_of(mean=float("inf"))))
    assert [each.reason for each in (*found.skipped, *other.skipped)] == ["its speedup is nan", "its mean_s is inf"]
    with pytest.raises(ValueError, match="line 2, a, latency: expected a number with a decimal point, got '0,5'"):
        read_tritonbench(csv_file(tmp_path, "x;a-latency\n1;0,5\n"))


def test_inputs_of_one_text_and_modes_of_one_op_are_not_one(tmp_path):
    rows = read_tritonbench(csv_file(tmp_path, "(M, M);a-latency\n(1, 2);0.5\n(1, 2);0.7\n")).records
    assert [each.case_id for each in rows] == ["x0=1,x1=2", "x0=1,x1=2,number=2"]
    modes = {f"tritonbench_gemm_{mode}[x_1-a]_latency": 0.5 for mode in ("fwd", "fwd_no_grad")}
    found = read_tritonbench(written(tmp_path / "result.json", modes)).records
    assert [(each.op, each.case_id) for each in found] == [("gemm", "x=1"), ("gemm", "x=1,mode=fwd_no_grad")]


def test_the_operator_comes_from_the_name_or_the_caller(tmp_path):
    path = csv_file(tmp_path, name="results.csv")
    with pytest.raises(ValueError, match=r"^op: expected the operator of results\.csv"):
        read_tritonbench(path)
    assert {each.op for each in read("tritonbench", [path], ["rms_norm"]).records} == {"rmsnorm"}


METRICS = {
    "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]_latency": 0.5,
    "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]_gbps": 1000.0,
    "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]_gpu_peak_mem": 2.0,
    "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]_best_config": "BLOCK: 64",
    "tritonbench_rms_norm_bwd[x_(16, 4096)-llama_rms]_latency": 0.9,
    "tritonbench_rms_norm_fwd[x_-1-liger]_latency": None,
    "tritonbench_rms_norm_fwd[x_average-llama_rms]_latency": 0.5,
    "tritonbench_rms_norm_fwd[llama_rms]-latency-avg": 0.5,
}


def test_keys_of_the_json_become_records(tmp_path):
    found = read_tritonbench(written(tmp_path / "result.json", METRICS))
    forward, backward = found.records
    assert (forward.op, forward.kernel, dict(forward.case)) == ("rmsnorm", "llama_rms", {"x0": 16, "x1": 4096})
    assert (forward.latency_median_ms, forward.bytes_per_s, forward.peak_memory_bytes) == (0.5, 1e12, 2e9)
    assert (backward.op, backward.latency_median_ms) == ("rms_norm_bwd", 0.9)
    assert [each.reason for each in found.skipped].count("an average over inputs of different sizes") == 2
    assert any("rms_norm_fwd[-1-liger]" in each.place for each in found.skipped), "a negative input, and no latency"


def test_the_environment_beside_the_metrics(tmp_path):
    environ = {"device": "NVIDIA H100", "benchmark_date": "20250815103000", "triton_commit": "abc"}
    environ |= {"cuda_version": "13.0", "conda_env": "unknown", "pytorch_commit": "unknown"}
    found = read_tritonbench(
        written(tmp_path / "result.json", {"name": "gemm", "environ": environ, "metrics": METRICS})
    ).records[0]
    assert found.timestamp == "2025-08-15T10:30:00+00:00" and found.environment["gpu"]["name"] == "NVIDIA H100"
    assert found.environment["imported"]["revisions"] == {"triton_commit": "abc"}
    assert found.environment["machine_key"].startswith("imported-nvidia-h100-")


def test_malformed_files_are_one_sentence_with_their_place(tmp_path):
    for text, message in (
        ("", "^op_gemm_a.csv, line 1: expected columns separated by ';'"),
        ("(M, N),aten-latency\n(1, 2),0.5\n", "^op_gemm_a.csv, line 1: expected columns separated by ';'"),
        ("x;aten-latency\n1;2;3\n", "^op_gemm_a.csv, line 2: expected 2 cells, got 3"),
        ("x;aten-latency\n", "^op_gemm_a.csv: expected results of tritonbench, got none"),
        ("x;a-latency;a-latency\n1;2;3\n", "^op_gemm_a.csv, line 1: expected each column once, got 'a-latency' twice"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tritonbench(csv_file(tmp_path, text, "op_gemm_a.csv"))
    for values, message in (
        ({"latency": 1.0}, "^result.json, 'latency': expected tritonbench_<op>_<mode>"),
        ([], "^result.json: expected an object, got list"),
        ({"metrics": 3}, "^result.json: expected 'metrics' as dict, got int"),
        ({"metrics": METRICS, "environ": {"benchmark_date": "soon"}}, "^result.json, benchmark_date: expected a time"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tritonbench(written(tmp_path / "result.json", values))

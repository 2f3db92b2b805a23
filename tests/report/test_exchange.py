"""Records to pytest-benchmark's form and back, bit for bit; other projects' benchmarks as records; faults of a file."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from test_history import record

from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.exchange import convert
from rooflab.bench.exchange.convert import export, read
from rooflab.bench.exchange.files import Imported, make_case, write_records
from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark, write_pytest_benchmark
from rooflab.bench.plugin.fixture_time import extra_info
from rooflab.bench.report.figures import cost_of
from rooflab.bench.report.trends.points import RecordFilter, read_points
from rooflab.reference.spec import Case
from rooflab.roofline.model import Ceilings, Cost, bound

SAMPLES = [3.3e-6, 1.1e-6, 2.0000000000000004e-6, 5e-6, 2.2e-6]


def sampled(number=0, **changes):
    """A time with samples; its median is one that `median(samples) * 1e3` would miss by a bit."""
    samples = {"samples": Record.packed(SAMPLES), "sample_count": len(SAMPLES), "case": {"M": 64}}
    samples |= {"latency_p20_ms": 2.1e-3, "latency_p80_ms": 2.3e-3}
    return record(number, math.nextafter(2.2e-3, 1), **(samples | changes))


def every_kind():
    """Records that use every sort of field."""
    errors = ({"output": "c", "max_abs_error": math.inf, "max_error_over_tolerance": 2.0},)
    return [
        sampled(config={"BLOCK": 64}, metrics={"gap": 0.1}, compiled=({"registers": 32},), weak=("c: zeros",)),
        sampled(1, kernel='odd, "name"', scheme="", dirty=False, seed=0, commit="a" * 40),
        record(2, None, status="INCORRECT", reason="wrong,\nin two lines", errors=errors, basis="bound"),
        Record(kind="engine", run_id="r9", status="OK", environment={"gpu": None}, metrics={"ttft_ms": 1e300}),
    ]


def test_pytest_benchmark_json_keeps_medians_and_samples_bit_for_bit(tmp_path):
    records = [sampled(), sampled(1, kernel="naive")]
    assert write_pytest_benchmark(records, tmp_path / "a.json") == []
    for one, other in zip(records, read_pytest_benchmark(tmp_path / "a.json").records, strict=True):
        kept = "case case_id scheme role backend device l2_state samples sample_count op kernel"
        for name in f"{kept} latency_median_ms latency_p20_ms latency_p80_ms".split():
            assert getattr(one, name) == getattr(other, name), name
        assert other.samples_s == SAMPLES and other.commit is None and other.checked_by == "none"
        assert other.timer == "imported: pytest-benchmark, cuda events"
        assert other.environment["machine_key"] == one.environment["machine_key"]


def test_an_export_has_each_name_once_and_lists_what_it_has_no_place_for(tmp_path):
    searched = [sampled(3, config={"BLOCK": size}, latency_median_ms=ms) for size, ms in ((1, 3.0), (2, 1.0), (3, 2.0))]
    older, newer = [sampled(number, scheme="fp16", latency_median_ms=float(number)) for number in (1, 2)]
    skipped = write_pytest_benchmark([newer, *searched, older, *every_kind()[2:], record(5, 1.0)], tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())["benchmarks"]
    assert [each["extra_info"]["rooflab"]["latency_median_ms"] for each in found] == [2.0, 1.0], "newest, and fastest"
    assert sorted({each.reason.partition(":")[0] for each in skipped}) == [
        *("INCORRECT", "another run or config of its name is written", "it has no samples", "of kind engine")
    ]


def named(fullname, median_s=2e-3, group=None, stats=None, **params):
    """One benchmark of a file, with the names and parameters that pytest-benchmark gives it."""
    name = fullname.rpartition("::")[2]
    test_id = name.partition("[")[2].removesuffix("]") or None
    found = {"fullname": fullname, "name": name, "group": group, "params": params or None, "param": test_id}
    measured = {"min": 1e-3, "max": 3e-3, "mean": 2e-3, "stddev": 1e-4, "median": median_s, "iqr": 1e-4, "rounds": 5}
    measured |= {"iterations": 1, "total": 1e-2, "data": [median_s] * 5}
    return found | {"extra_info": {"status": "flaky"}, "options": {}, "stats": measured | (stats or {})}


SORT = "t.py::test_sort[100-a,b=1]"


def foreign(*benchmarks, **changes):
    """A file of pytest-benchmark as a stranger's suite writes it."""
    machine = {"node": "my-secret-host", "machine": "x86_64", "system": "Linux", "python_version": "3.12.1"}
    machine["cpu"] = {"brand_raw": "AMD EPYC", "count": 8}
    values = {"machine_info": machine, "commit_info": {"id": "c" * 40, "dirty": True, "project": "theirs"}}
    values |= {"datetime": "2026-02-03T04:05:06.789012+00:00", "version": "5.1.0"}
    return values | {"benchmarks": list(benchmarks) or [named(SORT, n=100, how="a,b=1")]} | changes


def written(path, values):
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.fixture
def taken(tmp_path):
    """The records of a file with these values."""
    return lambda *of, **changes: read_pytest_benchmark(written(tmp_path / "a.json", foreign(*of, **changes))).records


def test_a_stranger_s_benchmark_is_a_record_with_its_commit_and_machine(taken):
    (found,) = taken()
    assert (found.op, found.kernel, found.case_id) == ("test_sort", "t.py::test_sort", "n=100,how=a%2Cb%3D1")
    assert Case.parse(found.case_id) == Case(**found.case), "its case can be named on the command line"
    assert (found.latency_median_ms, found.status, found.metrics["mean_s"]) == (2.0, "OK", 2e-3)
    assert (found.timestamp, found.commit, found.dirty) == ("2026-02-03T04:05:06+00:00", "c" * 40, True)
    assert found.environment["machine_key"].startswith("imported-amd-epyc-")
    assert "my-secret-host" not in found.to_json()
    (other,) = taken(commit_info={"id": "unversioned", "dirty": False})
    assert (other.commit, other.dirty) == (None, None)
    larger = foreign()["machine_info"] | {"cpu": {"brand_raw": "AMD EPYC", "count": 64}}
    (other,) = taken(machine_info=larger)
    assert other.environment["machine_key"] != found.environment["machine_key"], "of the same CPU, with more cores"


def test_a_verdict_of_the_plugin_is_kept_and_a_failed_benchmark_is_listed(tmp_path):
    def timed(name, verdict):
        info = {"timer": "cuda events", "l2_state": "cold", "status": verdict}
        return named(f"mine.py::{name}") | {"extra_info": info}

    tests = [timed("a", "INVALID: too fast"), timed("b", "NOISY: busy")]
    file = written(tmp_path / "a.json", foreign(*tests, {"name": "t", "fullname": "t.py::t", "stats": None}))
    first, second = read_pytest_benchmark(file).records
    assert (first.op, first.kernel, first.case_id) == ("a", "mine.py::a", "")
    assert (first.status, first.reason, first.l2_state, first.scheme) == ("INVALID", "too fast", "cold", None)
    assert (second.status, second.reason) == ("NOISY", "busy")
    (skipped,) = read_pytest_benchmark(file).skipped
    assert skipped.place == "t.py::t" and "no statistics" in skipped.reason


@pytest.mark.parametrize("stats", [{"median": "fast"}, {"median": True}, {"data": [1, "x"]}])
def test_a_number_that_is_none_is_named_with_its_place(taken, stats):
    with pytest.raises(ValueError, match=r"^a.json, benchmarks\[0\].stats"):
        taken(named(SORT, stats=stats))


def test_an_import_is_kept_once_and_makes_a_history(tmp_path):
    found = read("pytest-benchmark", [written(tmp_path / "a.json", foreign())])
    (path,) = write_records(found.records, tmp_path / "out")
    assert path.name.startswith("20260203T040506Z-") and record_files.read(path) == list(found.records)
    assert len(read_points([tmp_path / "out"])["points"]) == 1
    with pytest.raises(ValueError, match=f"^out: {path.name} is there already"):
        write_records(found.records, tmp_path / "out")


def test_a_case_from_anywhere_can_be_parsed_and_unknown_tools_and_forms_are_refused(tmp_path):
    case = make_case({"a b": 1, "1st": "x=1,2", "none": None, "flag": True})
    assert case.id == "a_b=1,_1st=x%3D1%2C2,none=None,flag=true" and Case.parse(case.id) == case
    assert make_case({"a b": 1, "a_b": 2}).id == "a_b=1,a_b_=2" and make_case({"a": "%2C"}) != make_case({"a": ","})
    with pytest.raises(ValueError, match="^tool: expected one of pytest-benchmark, .*got 'asv'"):
        read("asv", [tmp_path])
    with pytest.raises(ValueError, match="^form: expected pytest-benchmark, got 'asv'"):
        export("asv", [tmp_path], tmp_path / "a", RecordFilter())


def test_a_reader_of_another_package_is_an_entry_point(monkeypatch, tmp_path):
    def ours(paths):
        return Imported(tuple(sampled(number, kernel=path.stem) for number, path in enumerate(paths)))

    points = [SimpleNamespace(name="theirs", load=lambda: ours)]
    monkeypatch.setattr(convert, "entry_points", lambda group: points if group == "rooflab.readers" else [])
    found = read("theirs", [tmp_path / "a.txt", tmp_path / "b.txt"])
    assert [each.kernel for each in found.records] == ["a", "b"]
    with pytest.raises(ValueError, match="^tool: expected one of .*csv, theirs or published, got 'flashinfer'"):
        read("flashinfer", [tmp_path])


def test_the_command_line_imports_and_exports(rooflab, tmp_path):
    written(tmp_path / "a.json", foreign())
    status, out, _ = rooflab("import", "pytest-benchmark", "a.json", "--out", "kept", "--json")
    assert status == 0 and json.loads(out)["rows"][0]["latency_ms"] == 2.0 and len(json.loads(out)["written"]) == 1
    record_files.write(tmp_path / "kept" / "ours.jsonl", sampled(), *every_kind()[2:])
    status, out, _ = rooflab("export", "pytest-benchmark", "kept", "--to", "b.json", "--machine", "h200", "--json")
    assert status == 0 and json.loads(out)["records"] == 1 and len(json.loads(out)["left_out"]) == 1
    assert rooflab("import", "pytest-benchmark", "none.json")[0] == 2


ROOF = Ceilings("NVIDIA H100 80GB HBM3", "datasheet", 3.35e12, {"bf16": 989e12}, 67e12)


def priced(name, cost, median_s, status="OK", reason=""):
    """A test that gave the fixture a cost, with values as the plugin writes them."""
    limit, rates = bound(cost, ROOF), {}
    if status == "OK":
        rates = {"flops_per_s": cost.flops / median_s, "bytes_per_s": cost.bytes / median_s}
    record = Record(
        kind="bench",
        run_id="r",
        status=status,
        reason=reason,
        device="cuda",
        timer="cuda events",
        flops=cost.flops,
        least_bytes=cost.bytes,
        bound_ms=limit.seconds * 1e3,
        limiter=limit.limiter,
        bound_fraction=limit.seconds / median_s,
        **rates,
        basis="measured",
        environment={"machine_key": "h100-1", "gpu": {"name": ROOF.device}},
        latency_median_ms=median_s * 1e3,
        ceilings=asdict(ROOF),
    )
    return named(f"t.py::{name}", median_s) | {"extra_info": extra_info(record, cost)}


def on_gpu(*benchmarks, gpu=ROOF.device):
    machine = foreign()["machine_info"] | {"rooflab": {"machine_key": "h100-1", "gpu": {"name": gpu}}}
    return foreign(*benchmarks, machine_info=machine)


COST, MOVING = Cost(1e9, 1e9, {"bf16": 1e12}), Cost(1e9, 1e9)
TESTS = [
    priced("test_product[a-long-name]", COST, 2e-3),
    priced("test_copy", MOVING, 1e-3),
    priced("test_busy", MOVING, 1e-3, status="NOISY", reason="busy"),
    named(SORT),
]


def test_a_test_s_cost_and_bound_are_those_it_gave(tmp_path):
    product, copy, busy, plain = read_pytest_benchmark(written(tmp_path / "b.json", on_gpu(*TESTS))).records
    assert (product.flops, product.least_bytes, product.limiter) == (1e12, 2e9, "tensor")
    assert product.bound_ms == pytest.approx(1e15 / 989e12) and product.bound_fraction == product.bound_ms / 2
    assert copy.limiter == "memory" and copy.flops_per_s == 0 and Ceilings(**copy.ceilings) == ROOF
    assert cost_of(product) == COST and cost_of(busy) == MOVING and cost_of(plain) is plain.bound_ms is None
    assert busy.bound_ms > 0 and busy.bytes_per_s is busy.bound_fraction is None, "drawn pale, without a rate"
    info = {name: value for name, value in TESTS[0]["extra_info"].items() if name != "bound_s"}
    with pytest.raises(ValueError, match=r"^b.json, benchmarks\[0\].extra_info: expected the values of "):
        read_pytest_benchmark(written(tmp_path / "b.json", on_gpu(TESTS[0] | {"extra_info": info})))


def of_one_name(changes):
    """Eight benchmarks whose names are six, whose texts are three, and whose objects and groups are of this run."""
    at = f"UNSERIALIZABLE[<Kernel at {id(changes):#x}>]"
    parameters = [{"group": str(changes)}, {}, {}, {}, {"n": 1}, {"n": "1"}, {"k": at}, {"k": [at]}]
    names = ["a.py::test_x", "b.py::test_x", "a.py::One::test_y", "a.py::Two::test_y"]
    names += [f"a.py::test_z[{test_id}]" for test_id in ("1_0", "1_1")] + [f"a.py::test_k[k{n}]" for n in (0, 1)]
    tests = zip(names, changes, parameters, strict=True)
    return [named(name, 2e-3 * change, **given) for name, change, given in tests]


def test_imports_are_compared_and_benchmarks_of_one_name_are_not_one(rooflab, tmp_path):
    changes = (2, 0.5) * 4
    for name, minute, factors in (("a", "05", (1,) * 8), ("b", "06", changes)):
        written(tmp_path / f"{name}.json", foreign(*of_one_name(factors), datetime=f"2026-02-03T04:{minute}:06+00:00"))
        assert rooflab("import", "pytest-benchmark", f"{name}.json", "--out", name)[0] == 0
    status, out, _ = rooflab("ab", "--records", "a", "--records", "b", "--json")
    (outcomes,) = json.loads(out)["tables"].values()
    assert status == 13 and [1 + each["effect"] for each in outcomes] == pytest.approx(changes)
    assert [each["key"] for each in outcomes] == [each["fullname"] for each in of_one_name(changes)], "pytest's ids"
    assert len(read_points([tmp_path / "a"])["points"]) == 8
    other = foreign(*of_one_name(changes), commit_info={"id": "d" * 40, "dirty": False})
    assert rooflab("import", "pytest-benchmark", written(tmp_path / "c.json", other), "--out", "b")[0] == 0
    status, _, err = rooflab("ab", "--records", "a", "--records", "b")
    assert status == 2 and "expected one commit in b, got" in err


def test_the_case_is_the_parameters_and_the_tests_id_where_it_says_more(taken):
    tests = {
        "t.py::t[up-1]": ({"how": "up", "n": 1}, "how=up,n=1"),
        "t.py::t[True]": ({"flag": True}, "flag=true"),
        "t.py::t[true]": ({"flag": "true"}, "flag=true,id=true"),
        "t.py::t[small]": ({"n": 1}, "n=1,id=small"),
        "t.py::t[k0-1]": ({"k": ["UNSERIALIZABLE[<Kernel at 0x7f>]"], "n": 1}, "n=1,id=k0-1"),
        "d[1]/t.py::t": ({}, ""),
    }
    found = taken(*(named(name, **params) for name, (params, _) in tests.items()))
    assert [each.case_id for each in found] == [case for _, case in tests.values()]
    assert [each.kernel for each in found] == ["t.py::t"] * 5 + ["d[1]/t.py::t"]


@pytest.mark.parametrize("median_s", [0, -1.0, math.nan, math.inf, 10**400])
def test_a_time_that_is_none_makes_one_benchmark_invalid_and_not_the_file(taken, median_s):
    sample = {"data": [1e-3, median_s, 1e-3], "mean": median_s}
    first, second, third = taken(named("t.py::a", median_s), named("t.py::b"), named("t.py::c", stats=sample))
    shown = float("inf") if median_s == 10**400 else median_s
    assert (first.status, first.latency_median_ms) == ("INVALID", None)
    assert first.reason == f"a latency of {shown * 1e3:g} ms"
    assert second.status == "OK" and (third.samples is None or "nan" not in third.to_json())
    if median_s:
        assert third.status == "INVALID" and third.reason.startswith("a sample of ")

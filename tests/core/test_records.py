import json
import math
import random
import resource
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from rooflab.bench.ab.output import write_junit, write_markdown
from rooflab.bench.ab.verdict import Outcome
from rooflab.bench.base.plain import number_in
from rooflab.bench.core import record as schema
from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.report.figures import Drawing, draw
from rooflab.bench.report.page import write_report
from rooflab.kernels import registry
from rooflab.roofline.model import Ceilings
from rooflab.roofline.points import Point


def make(**changes):
    values = {"kind": "bench", "run_id": "r1", "status": "OK", "environment": {"cpu": "x"}} | changes
    return Record(**values)


def measured(**changes):
    values = {
        "op": "gemm",
        "kernel": "library",
        "role": "library",
        "backend": "torch",
        "device": "cpu",
        "checked_by": "torch",
        "basis": "measured",
        "case_id": "M=2,x=0.5,y=true",
        "case": {"M": 2, "x": 0.5, "y": True},
        "latency_median_ms": 0.1,
        "samples": Record.packed([1e-4, 2e-4]),
        "sample_count": 2,
        "limiter": "memory",
        "l2_state": "cold",
        "traffic_basis": "modelled",
    }
    return make(**(values | changes))


def test_a_record_survives_the_file_unchanged(tmp_path):
    seconds = [3e-6, 1e-6, 2.0000000000000004e-6, 0.0]
    errors = ({"output": "c", "max_abs_error": 0.25, "max_error_over_tolerance": 0.5},)
    record = measured(errors=errors, samples=Record.packed(seconds))
    record_files.write(tmp_path / "deep" / "er" / "a.jsonl", record)
    (found,) = record_files.read(tmp_path / "deep" / "er" / "a.jsonl")
    assert found == record and found.samples_s == seconds and make().samples_s == []


GOOD = json.loads(make().to_json())


OTHERS = {
    "cut off": ('{"schema_version": "1.0"', "the last record is truncated"),
    "a list": ("[1]\n", ""),
    "no object": ("nonsense\n", ""),
    "without its fields": ('{"schema_version": "1.0", "kind": "bench"}\n', ""),
    "of a newer version": (json.dumps(GOOD | {"schema_version": "2.0"}) + "\n", "schema_version: expected 1"),
}


@pytest.mark.parametrize(("line", "said"), OTHERS.values(), ids=OTHERS)
def test_a_line_that_is_no_record_is_named_with_its_place(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_text(make().to_json() + "\n" + line)
    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 2: {said}"):
        record_files.read(tmp_path)


def test_a_newer_minor_version_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD | {"schema_version": "1.7", "colour": "blue"}) + "\n")
    assert record_files.read(tmp_path)[0].schema_version == "1.7"
    with pytest.raises(ValueError, match="records: expected a file or folder"):
        record_files.read(tmp_path / "none")


def test_non_finite_errors_are_valid_json_and_come_back(tmp_path):
    errors = ({"output": "c", "max_abs_error": math.nan, "max_error_over_tolerance": math.inf},)
    line = make(status="INCORRECT", reason="wrong", errors=errors).to_json()
    json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    back = Record.from_json(line).errors[0]
    assert math.isnan(back["max_abs_error"]) and back["max_error_over_tolerance"] == math.inf
    with pytest.raises(ValueError, match="^record: expected the numbers that JSON has, got NaN"):
        Record.from_json(line.replace('"nan"', "NaN"))


def test_a_value_that_is_none_of_its_field_is_refused():
    fields = "kind status checked_by basis role backend device l2_state limiter traffic_basis verdict schema_version"
    for field in fields.split():
        line = json.dumps(json.loads(measured().to_json()) | {field: "other"})
        with pytest.raises(ValueError, match=rf"^{field}: expected .*got 'other'"):
            Record.from_json(line)
    with pytest.raises(ValueError, match="^timestamp: expected a time in ISO 8601, got 'noon'"):
        make(timestamp="noon")


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("seed", "7", "int"),
        ("seed", True, "int"),
        ("latency_median_ms", "fast", "a number"),
        ("weak", "ones", "an array"),
        ("environment", [], "an object"),
        ("dirty", 1, "bool"),
        ("reason", None, "str"),
    ],
)
def test_a_field_of_another_type_in_a_strangers_file_is_named(field, value, wanted):
    line = json.dumps(json.loads(measured().to_json()) | {field: value})
    with pytest.raises(ValueError, match=rf"^{field}: expected {wanted}, got "):
        Record.from_json(line)


def test_interpreter_time_is_never_a_latency():
    untimed = {"latency_median_ms": None, "samples": None, "sample_count": None, "basis": "bound"}
    for backend in ("triton", "gluon", "cuda"):
        for checked_by, device in (("interpreter", "cuda"), ("none", "cpu")):
            with pytest.raises(ValueError, match="interpreter"):
                measured(backend=backend, checked_by=checked_by, device=device)
        assert measured(backend=backend, checked_by="gpu", device="cuda").latency_median_ms == 0.1
        assert measured(backend=backend, checked_by="interpreter", **untimed).basis == "bound"


def test_a_failure_publishes_no_latency_and_has_a_reason_and_a_latency_a_basis():
    for status in ("INCORRECT", "UNSUPPORTED", "RUNTIME_ERROR", "TIMEOUT"):
        with pytest.raises(ValueError, match=f"status {status} publishes no latency"):
            measured(status=status, reason="because")
    with pytest.raises(ValueError, match="^basis: "):
        measured(basis="bound")
    with pytest.raises(ValueError, match="^reason: "):
        make(status="UNAVAILABLE")
    assert make(timestamp="2026-01-01T10:30:00+02:00").timestamp == "2026-01-01T08:30:00+00:00", "one zone for all"


def test_a_number_of_another_tool_has_a_decimal_point():
    numbers = {"1,234,567": 1234567.0, "12.": 12.0, "-1e-3": -0.001, "n/a": None, "1,23,4": None}
    assert {text: number_in(text, "ncu") for text in numbers} == numbers
    for wrong in ("1.234,5", "0,123", "1234,5"):
        with pytest.raises(ValueError, match="ncu: expected a number with a decimal point"):
            number_in(wrong, "ncu")


def test_a_run_writer_keeps_to_its_run_and_a_folder_is_read_in_order(tmp_path):
    for run in ("b", "a"):
        RunWriter(tmp_path, run).write(make(run_id=run), make(run_id=run, status="TIMEOUT", reason="slow"))
    (tmp_path / "notes.txt").write_text("not a record")
    found = [(one.run_id, one.status) for one in record_files.read(tmp_path)]
    assert found == [("a", "OK"), ("a", "TIMEOUT"), ("b", "OK"), ("b", "TIMEOUT")]
    writer = RunWriter(tmp_path / "results")
    assert not writer.path.exists() and writer.run_id not in ("a", "b"), "a run that wrote nothing leaves no file"
    with pytest.raises(ValueError, match="^run_id: "):
        writer.write(make(run_id="another"))


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that takes 4,096 bytes of each file.  Python would keep such a part of a module's bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


TOY = Ceilings("toy", "measured", 80.0, {"bf16": 800.0}, 40.0)
POINT = Point("naive", "gemm", "M=8", "naive", "bf16", 1000.0, 1000.0, "counted", 2.0, 20.0)
OUTCOME = Outcome("gemm/naive", "SAME", "as fast")
OUTPUTS = {
    "records": ("done.jsonl", lambda path: record_files.write(path, measured(reason="x" * 9000))),
    "roofline": ("roofline-toy.svg", lambda path: draw(Drawing([POINT], [TOY], "toy"), path.parent)),
    "report": ("report.html", lambda path: write_report([path.parent / "done.jsonl"], path)),
    "junit": ("ab.xml", lambda path: write_junit(path, [OUTCOME] * 99, strict=True)),
    "markdown": ("ab.md", lambda path: write_markdown(path, "t", [OUTCOME] * 99, [])),
}


@pytest.mark.parametrize("name, write", OUTPUTS.values(), ids=OUTPUTS)
def test_a_full_disk_cuts_no_output_and_its_error_names_the_file(name, write, tmp_path, full_disk):
    record_files.write(tmp_path / "done.jsonl", measured())
    (tmp_path / "noise").write_bytes(random.Random(0).randbytes(4096))
    if name != "done.jsonl":
        (tmp_path / name).write_text("the old one")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OSError) as full:
        write(tmp_path / name)
    assert full.value.filename == str(tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_writers_at_the_same_time_do_not_mix_their_lines(tmp_path):
    path, names = tmp_path / "a.jsonl", {f"r{i}" for i in range(20)}
    long = Record.packed([float(i) ** 0.5 for i in range(2000)])
    with ThreadPoolExecutor(len(names)) as threads:
        for name in names:
            threads.submit(record_files.write, path, measured(run_id=name, samples=long))
    assert {record.run_id for record in record_files.read(path)} == names


def test_a_record_is_read_without_torch():
    lines = """
    import sys
    from rooflab.bench.core import Record, read
    assert read and Record and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], check=True, timeout=60)
    for name in ("Role", "Backend", "CPU_BACKENDS"):
        assert getattr(schema, name) == getattr(registry, name), "the schema's own, for the registry imports torch"

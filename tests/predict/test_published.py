"""Kernel times that others published: the import, the committed tables, and values between their shapes."""

import json
import lzma
import random
import zipfile
from dataclasses import replace
from math import log
from statistics import median, quantiles

import pandas as pd
import pytest

from rooflab.bench.exchange.published import read_published, selected, write_published
from rooflab.roofline import published
from rooflab.roofline.architecture import PRESETS
from rooflab.roofline.device import get_device
from rooflab.roofline.step_times import loaded_itl_ms, step_time

H100, LLAMA_8B, LLAMA_70B = get_device("h100"), PRESETS["llama-3.1-8b"], PRESETS["llama-3.1-70b"]
TABLES = published.load()
GEMM = "systems/data/h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"


def committed(**wanted):
    (found,) = (t for t in TABLES if all(getattr(t, name) == value for name, value in wanted.items()))
    return replace(found)  # a copy: its times may be changed


def products(**changes):
    """A file of products as aiconfigurator-core has it: three shapes in two dtypes, and one dtype without a place."""
    rows = [(m, 4096, 4096, dtype) for m in (1, 64, 4096) for dtype in ("bfloat16", "fp8", "int8")]
    frame = pd.DataFrame(rows, columns=["m", "n", "k", "gemm_dtype"])
    more = {"device": "NVIDIA H100 80GB HBM3", "kernel_source": "linear", "latency": [0.02] * 6 + [0.2] * 3}
    return frame.assign(**more | changes)


@pytest.fixture
def package(tmp_path):
    """A folder of the package's layout with one file, and the function that writes it."""

    def write(frame, name=GEMM):
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path)
        return tmp_path / "package"

    return write


def test_rows_are_placed_or_counted_and_come_back_from_what_was_written(package, tmp_path):
    folder = package(products())
    found = read_published([folder])
    assert (found.read, dict(found.left)) == (9, {"gemm": 3})
    assert [(each.table.op, each.table.scheme, each.table.rows) for each in found.placed] == [
        ("gemm", "bf16", 3),
        ("gemm_fp8", "fp8_e4m3", 3),
    ]
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / GEMM, GEMM)
    assert read_published([wheel]).summary() == found.summary()
    write_published(selected(found), tmp_path / "out")
    table, _ = published.load(tmp_path / "out")
    assert table.time({"M": 64, "N": 4096, "K": 4096}).seconds == pytest.approx(20e-6)
    assert (table.gpu, table.framework, table.version, table.copies) == ("h100-sxm", "vllm", "0.24.0", 6)
    assert table.licence == "Apache-2.0" and "CUDA graph" in table.timing and GEMM in table.source
    unnamed = read_published([package(products(kernel_source=None))]).placed
    assert [each.table.rows for each in unnamed] == [3, 3]


def test_a_row_faster_than_the_gpu_is_named_and_many_are_refused(package):
    many = pd.concat([products(n=4096 + step) for step in range(30)])
    many["latency"] = many["latency"] + 0.2
    many.iloc[0, many.columns.get_loc("latency")] = 0.001  # 33 MB of weights in a microsecond
    found = read_published([package(many)])
    assert [len(each.below) for each in found.placed] == [1, 0]
    assert "M = 1, N = 4096, K = 4096: 1 us, bound 7.4" in found.placed[0].below[0]
    with pytest.raises(ValueError, match="are faster than a NVIDIA H100 80GB HBM3 can be: is the latency in ms?"):
        read_published([package(products(latency=[1e-5] * 9))])


def test_committed_times_are_those_that_their_sources_are_known_for():
    gemm = committed(gpu="h100-sxm", op="gemm")
    assert gemm.time({"M": 4096, "N": 4096, "K": 4096}).seconds == pytest.approx(166.0e-6, rel=1e-3)
    assert gemm.time({"M": 8192, "N": 8192, "K": 8192}).seconds == pytest.approx(1541.7e-6, rel=1e-3)
    rates = {
        gpu: max(2 * m * n * k / s for (m, n, k), s in committed(gpu=gpu, op="gemm").times.items())
        for gpu in ("h100-sxm", "h200")
    }
    assert rates == pytest.approx({"h100-sxm": 956e12, "h200": 940e12}, rel=1e-3)
    attention = committed(gpu="h100-sxm", op="flash_attention", framework="vllm")
    names = (*attention.exact, *attention.axes)
    reached = dict.fromkeys((64, 128, 256), 0.0)
    for shape, seconds in attention.times.items():
        row = dict(zip(names, shape, strict=True))
        if row["context"] == 16384 and row["window"] == 0 and row["D"] in reached:
            rate = attention.least_s(row) * 989.4e12 / seconds
            reached[row["D"]] = max(reached[row["D"]], rate)
    assert reached == pytest.approx({64: 527e12, 128: 676e12, 256: 787e12}, rel=5e-3)


def test_no_committed_time_is_below_its_bound():
    rng = random.Random(0)
    for table in TABLES:
        for shape in rng.sample(sorted(table.times), min(100, table.rows)):
            named = dict(zip((*table.exact, *table.axes), shape, strict=True))
            assert table.times[shape] >= 0.9995 * table.least_s(named, cached=True)


@pytest.mark.parametrize("op", ["gemm", "paged_attention", "flash_attention"])
def test_a_tenth_of_the_rows_held_out_is_interpolated(op):
    table = committed(gpu="h100-sxm", op=op, framework="vllm", scheme="bf16")
    rng = random.Random(1)
    held = {shape for shape in table.times if rng.random() < 0.1}
    rest = replace(table)
    rest.__dict__["times"] = {shape: time for shape, time in table.times.items() if shape not in held}
    errors = []
    for shape in rng.sample(sorted(held), 300):
        found = rest.time(dict(zip((*table.exact, *table.axes), shape, strict=True)))
        errors += [abs(found.seconds / table.times[shape] - 1)] if found.seconds else []
    assert len(errors) > 250 and median(errors) <= 0.04 and quantiles(errors, n=10)[-1] <= 0.15


def test_between_shapes_the_ratio_to_the_bound_is_linear_in_logarithms():
    table = replace(committed(gpu="h100-sxm", op="gemm"), exact=(), rows=4)
    corners = {(4096, n, k): table.least_s({"M": 4096, "N": n, "K": k}) for n in (4096, 16384) for k in (4096, 16384)}
    table.__dict__["times"] = {s: 2 * t if s[1] == 4096 else 4 * t for s, t in corners.items()}
    shape = {"M": 4096, "N": 8192, "K": 9000}
    found = table.time(shape)
    # Halfway between 2 and 4 times the bound, in logarithms; the start of a launch moves it by less than 2%.
    assert found.how == "interpolated" and found.seconds == pytest.approx(8**0.5 * table.least_s(shape), rel=0.02)
    assert table.time(shape | {"N": 20000}).how == "N = 20000 is outside of 4096 to 16384"
    assert table.time(shape | {"M": 4095}).seconds is None
    assert log(found.seconds) < log(table.time(shape | {"N": 16384}).seconds)


@pytest.mark.parametrize("content", [b"", b"xz", lzma.compress(b"a,us\n1,2\n")])
def test_a_table_that_does_not_fit_its_index_is_refused(tmp_path, content):
    table = committed(gpu="h100-sxm", op="all_reduce", framework="nccl")
    with pytest.raises(ValueError, match="expected 64 rows"):
        _ = replace(table, rows=64).times
    (tmp_path / table.file).write_bytes(content)
    with pytest.raises(ValueError, match="is not the table that tables.json describes"):
        _ = replace(table, folder=tmp_path).times
    (tmp_path / "tables.json").write_text(json.dumps({"tables": [{"file": "x"}]}))
    with pytest.raises(ValueError, match="is no index of tables"):
        published.load(tmp_path)


def test_a_step_is_the_sum_of_its_ops_and_says_whence_each_comes():
    step = step_time(LLAMA_8B, H100, "decode", 1, 2048)
    assert step.ms == pytest.approx(sum(op.ms for op in step.ops)) and step.published_share > 0.9
    sites = {op.site: op for op in step.ops}
    assert sites["o_proj"].basis == "published" and sites["o_proj"].ms == pytest.approx(32 * 15.05e-3, rel=1e-3)
    assert sites["gate_up_proj"].basis == "interpolated"
    assert sites["lm_head"].source.endswith("as 2 of N = 64128")
    assert sites["kv_cache_write"].ms == 0 and sites["kv_cache_write"].source == "in the time of paged_attention"
    assert sites["norms"].basis == "bound"
    far = step_time(LLAMA_8B, H100, "prefill", 1, 32_768)
    assert next(op for op in far.ops if op.site == "attention").source == "context = 32768 is outside of 1 to 16384"


def test_a_step_of_several_gpus_has_all_reduces_and_no_other_gpu_has_times():
    step = step_time(LLAMA_70B, H100, "decode", 16, 2048, gpus=4)
    reduced = step.ops[-1]
    assert (reduced.op, reduced.calls, reduced.basis) == ("all_reduce", 160, "published")
    assert step.parts_ms()["all-reduces"] == reduced.ms
    assert step_time(LLAMA_8B, get_device("a100"), "decode", 1, 2048) is None
    fp8 = step_time(LLAMA_8B, H100, "decode", 1, 2048, "fp8_e4m3", "fp8_e4m3")
    kinds = {op.site: op.source for op in fp8.ops}
    assert "CutlassFP8" in kinds["gate_up_proj"] and "linear" in kinds["lm_head"]
    assert fp8.ms < step_time(LLAMA_8B, H100, "decode", 1, 2048).ms


PAGE = (published.TABLES_FOLDER / "end_to_end.md").read_text().splitlines()


@pytest.mark.parametrize(("model", "gpus"), [("llama-3.1-8b", 1), ("llama-3.1-70b", 4)])
def test_sums_of_published_times_are_near_published_times_of_engines_under_load(model, gpus):
    table = pd.read_csv(published.TABLES_FOLDER / "end_to_end.csv")
    table = table[(table.model == model) & (table.gpu == "h100-sxm") & (table.gpus == gpus)]
    for (dtype, engine), own in table.groupby(["dtype", "engine"]):
        loads = zip(own.requests, own.prompt, own.output, strict=True)
        sums = [loaded_itl_ms(PRESETS[model], H100, *load, weight_dtype=dtype, gpus=gpus) for load in loads]
        (line,) = [text for text in PAGE if text.startswith(f"| {model} | h100-sxm | {gpus} | {dtype} | {engine} |")]
        assert f" | {(sums / own.itl_ms).median():.2f} | " in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frame: frame.drop(columns="k"), "expected a column 'k', got m, n, gemm_dtype"),
        (lambda frame: frame.assign(latency=-1.0), "expected finite times above 0, got -1.0"),
        (lambda frame: frame.assign(k="wide"), "gemm_perf.parquet, column 'k': expected only numbers, got 'wide'"),
        (lambda frame: frame.assign(device="NVIDIA H999"), "expected a GPU that roofline/device.py knows"),
    ],
)
def test_a_file_that_is_another_one_is_refused(package, tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        read_published([package(change(products()))])
    with pytest.raises(ValueError, match="path: expected a wheel or folder of aiconfigurator-core .* got none"):
        read_published([])
    (tmp_path / "broken.whl").write_bytes(b"PK")
    with pytest.raises(ValueError, match="expected a wheel"):
        read_published([tmp_path / "broken.whl"])


TIMES = """gpu,rows,width,ms,config
NVIDIA H200,1,4096,0.003,"{""dtype"": ""bf16""}"
NVIDIA H200,64,4096,0.004,"{""dtype"": ""fp32""}"
"""


COLUMNS = """
name = "Ours"
version = "1"
licence = "MIT"
url = "https://example.org"
files = "times.csv"
timing = "a stopwatch"
device = "gpu"
kernel = "dtype"
latency = "ms"
unit = "ms"
json = "config"
[[table]]
where = { dtype = ["bf16"] }
op = "rmsnorm"
scheme = "bf16"
axes = { T = "rows", H = "width" }
"""


def read_times(folder, old="", new=""):
    """What is read of the two texts with one change."""
    (folder / "times.csv").write_text(TIMES.replace(old, new) if old else TIMES)
    (folder / "times.toml").write_text(COLUMNS.replace(old, new) if old else COLUMNS)
    return read_published([folder / "times.toml"])


def test_a_short_file_names_the_columns_of_any_table(tmp_path):
    found = read_times(tmp_path)
    assert [(each.table.gpu, each.table.op, each.table.rows) for each in found.placed] == [("h200", "rmsnorm", 1)]
    assert dict(found.left) == {"times.csv": 1}
    (scaled,) = read_times(tmp_path, "[[table]]", "[[table]]\nscale = { T = 2 }").placed
    assert scaled.rows["T"].tolist() == [2]
    assert read_times(tmp_path, "0.003", '"1,000.5"').placed[0].rows["us"].tolist() == [1000500.0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0.003", '"0,003"', "column 'ms': expected a number with a decimal point, got '0,003'"),
        ("1,4096", "1.5,4096", "column 'rows': expected whole numbers, got 1.5"),
        ("1,4096,0.003", "1,4096,0,003", "times.csv: not a whole table"),
        ('bf16""}', 'bf16""', "times.csv, column 'config': expected JSON"),
        ("licence", "license", "expected 'licence'"),
        ('unit = "ms"', 'unit = "min"', "the latency's unit, one of s, ms, us, ns, got 'min'"),
        ('op = "rmsnorm"', "", "table 1: expected 'op'"),
        ("[[table]]", "[", "not TOML"),
    ],
)
def test_a_short_file_that_does_not_fit_is_refused(tmp_path, old, new, words):
    with pytest.raises(ValueError, match=words):
        read_times(tmp_path, old, new)

"""`rooflab static`: its table, details, JSON and records, and the input that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from op_kernels import own_registry  # noqa: F401
from typer.testing import CliRunner

from rooflab.bench.cli.app import app
from rooflab.bench.compile.cases import Query
from rooflab.bench.core import record_files
from rooflab.kernels import registry

KERNELS = """
from dataclasses import dataclass
import torch, triton, triton.language as tl
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import Tuning

@triton.jit
def halve(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 0.5, mask=i < n)

@dataclass(frozen=True)
class Config:
    block: int

def legal(config, case, scheme=None):
    return config.block <= 2048

@register(
    op="silu_and_mul", name="test_halve", role="optimized", backend="triton",
    tuning=Tuning(
        Config,
        configs=lambda case, scheme=None: (Config(256), Config(1024), Config(4096)),
        heuristic=lambda case, scheme=None: Config(512),
        rule=legal,
    ),
)
def by_block(x, *, config=None):
    y = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    block = config.block if config else 512
    for _ in range(2):
        halve[(triton.cdiv(y.numel(), block),)](x, y, y.numel(), block, num_stages=2)
    return y

@register(op="silu_and_mul", name="test_torch", role="optimized", backend="torch")
def by_torch(x):
    return x

@register(op="silu_and_mul", name="test_refuses", role="optimized", backend="triton", min_sm=100)
def newer(x):
    return by_block(x)
"""
CASE = "T=64,I=1024"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Registered once: a second loading of the same kernels is refused."""
    path = tmp_path_factory.mktemp("kernels") / "mine.py"
    path.write_text(KERNELS)
    return path


def run(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["static", *map(str, arguments)], catch_exceptions=False)
    return done.exit_code, done.stdout


def test_the_table(file):
    status, text = run("--kernel", file, "--case", CASE, "--scheme", "bf16", "silu_and_mul")
    head, row, *rest = text.splitlines()
    assert status == 0 and head.split()[:4] == ["kernel", "scheme", "case", "launch"]
    figures = dict(zip(head.split(), row.replace("halve x2", "halvex2").split(), strict=False))
    assert figures["kernel"] == "silu_and_mul/test_halve" and figures["launch"] == "halvex2"
    assert (figures["threads"], figures["cta/sm"], figures["by"]) == ("128", "16", "warps")
    assert (figures["spill"], figures["tensor"]) == ("0", "none")
    assert float(figures["waves"]) == pytest.approx(128 / (16 * 132), abs=1e-3) and figures["tail"] == "128"
    assert "num_stages=2 was asked for, and the code has no loop to pipeline" in text
    assert "UNSUPPORTED: silu_and_mul/test_refuses" in text and "needs sm100, found sm90" in text
    assert "test_torch" not in text
    assert rest[-1].startswith("kernels: 2; compilations for sm_90a: 2; failed: 0;")


def test_json_and_records(file, tmp_path):
    """The same content as JSON and as records, with the config that the launcher chooses."""
    arguments = ["silu_and_mul", "--kernel", file, "--case", CASE, "--scheme", "fp16", "--json"]
    status, text = run(*arguments, "--out", tmp_path / "out")
    shown = json.loads(text)
    assert status == 0 and [entry["config"] for entry in shown["results"]] == [{"block": 512}, None]
    records = record_files.read(Path(shown["records"]))
    found = [(r.kind, r.status, r.backend, r.case_id, r.scheme) for r in records]
    assert found == [("static", status, "triton", CASE, "fp16") for status in ("OK", "UNSUPPORTED")]
    for record, entry in zip(records, shown["results"], strict=True):
        assert record.config == entry["config"] and list(record.compiled) == entry["launches"]
        assert record.latency_median_ms is None
    (launch,) = records[0].compiled
    assert launch["grid"] == [64 * 1024 // 512]
    assert launch["registers"] > 0 and launch["launches"] == 2 and launch["findings"]


@pytest.mark.parametrize(
    ("name", "old", "new", "status", "said"),
    [
        ("test_broken", "* 0.5", "* no_such_name", 11, "COMPILE_ERROR"),
        ("test_newer", '"triton",\n', '"triton", min_sm=100,\n', 13, "UNSUPPORTED"),
    ],
)
def test_a_kernel_that_does_not_compile_is_no_pass(tmp_path, name, old, new, status, said):
    text = KERNELS[: KERNELS.index('@register(op="silu_and_mul", name="test_torch"')]
    (tmp_path / "mine.py").write_text(text.replace("test_halve", name).replace(old, new))
    arguments = ("silu_and_mul", "--kernel", tmp_path / "mine.py", "--case", CASE, "--scheme", "bf16")
    found, shown = run(*arguments, "--out", tmp_path / "out")
    assert found == status and f"{said}: silu_and_mul/{name}" in shown, shown
    assert [record.status for record in record_files.read(tmp_path / "out")] == [said]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", CASE], "case: expected an op with it"),
        (["silu_and_mul", "--case", "T=64"], "case: silu_and_mul takes"),
        (["--suite", "absent"], "suite: expected one of"),
        (["--scheme", "int1"], "scheme: expected one of"),
        (["gemm", "--kernel", "library"], "kernel: expected one in triton"),
        (["gemm", "--kernel", "absent"], "kernel: gemm has"),
        (["--gpu", "a100"], "gpu: expected one that runs sm_90a"),
        (["gemm", "--compare", "HEAD", "--out", "kept"], "compare: expected no --out with it"),
    ],
)
def test_what_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        run(*arguments)


def test_the_most_work_of_a_suite_is_selected_for_each_dtype():
    chosen = Query("gemm", ("tensor_core",), ("llama3_8b",), (), ()).select()
    assert [item.scheme.name for item in chosen] == ["fp32", "fp16", "bf16", "tf32"]
    cases = registry.get_op("gemm").cases["llama3_8b"]
    assert {item.case for item in chosen} == {max(cases, key=lambda case: case["M"] * case["N"] * case["K"])}
    every = Query("gemm", ("tensor_core",), ("llama3_8b",), (), ("bf16",), every_case=True).select()
    assert {item.case for item in every} == set(cases)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_registry: None) -> None:  # noqa: F811
    """What a test registers is gone after it, and what it compiles is kept in a folder of its own."""
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))

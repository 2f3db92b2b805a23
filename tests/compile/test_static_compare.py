"""The compiled code of two trees side by side: losses that fail a pull request, and changes that are only reported."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rooflab.kernels.registry
from rooflab.bench.cli.app import app
from rooflab.bench.compile import compiled_sides as two
from rooflab.bench.compile import difference
from rooflab.bench.compile.cases import device_for
from rooflab.bench.compile.compiled_sides import CompiledTree
from rooflab.bench.compile.difference import Query, compare_pairs, matched
from rooflab.bench.compile.static import compilers
from rooflab.bench.compile.store import Store, tree_hash

ROOT = Path(rooflab.kernels.registry.__file__).parent.parent
GEMM = '''"""A gemm."""
import torch, triton, triton.language as tl
from rooflab.kernels.registry import register

@triton.jit
def product(a, b, c, K, N):
    i = tl.arange(0, 64)
    acc = tl.zeros((64, 64), tl.float32)
    for k in range(0, K, 64):
        acc = tl.dot(tl.load(a + i[:, None] * K + k + i), tl.load(b + (k + i)[:, None] + i * K), acc)
    tl.store(c + i[:, None] * N + i, acc.to(tl.bfloat16))

@register(op="gemm", name="product", role="optimized", backend="triton")
def gemm(a, b, bias=None):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    product[(1,)](a, b, c, a.shape[1], b.shape[1], num_warps=4)
    return c
'''
KEPT = GEMM.replace("product", "kept")
REFERENCES = "contract spec special captured compare domain gemm rows rules quantization".split()
"""What the op needs of the references."""
QUERY = Query(suites=("smollm2_135m",), schemes=("bf16",))


def make_tree(folder: Path, gemm: str) -> Path:
    """A tree of one op, with this tree's registry and specs."""
    for layer in ("roofline", "reference", "kernels"):
        (folder / layer).mkdir(parents=True)
        for file in (ROOT / layer).glob("*.py"):
            if layer != "reference" or file.stem in REFERENCES:
                shutil.copy(file, folder / layer)
    (folder / "kernels" / "gemm").mkdir()
    (folder / "kernels" / "gemm" / "__init__.py").write_text('"""An op."""\n')
    (folder / "kernels" / "gemm" / "ours.py").write_text(gemm)
    (folder / "kernels" / "gemm" / "kept.py").write_text(KEPT)
    return folder


@contextmanager
def side(tree: Path) -> Iterator[CompiledTree]:
    workers = compilers(tree)
    try:
        yield CompiledTree(tree.name, workers, tree_hash(tree), tree)
    finally:
        workers.stop()


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CompiledTree, CompiledTree]]:
    folder = tmp_path_factory.mktemp("trees")
    base = make_tree(folder / "base", GEMM)
    head = make_tree(folder / "head", GEMM.replace("num_warps=4", "num_warps=2"))
    with side(base) as first, side(head) as second:
        yield first, second


@pytest.mark.more
def test_every_kernel_of_either_tree_has_a_verdict_and_its_evidence(sides, tmp_path, monkeypatch):
    store = Store(tmp_path / "static")
    changes = {change.kernel: change for change in compare_pairs(*sides, matched(*sides, QUERY), device_for(), store)}
    verdicts = {name: change.verdict for name, change in changes.items()}
    assert verdicts == {"product": "LOST TENSOR CORES", "kept": "SAME"}
    assert "num_warps=2 is less than a warpgroup's 4" in "\n".join(changes["product"].sentences)

    def compared(*more: str) -> Any:
        arguments = ["static", "gemm", "--suite", "smollm2_135m", "--scheme", "bf16", "--compare", "main", *more]
        return CliRunner().invoke(app, arguments)

    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(two, "two_sides", lambda *of: contextmanager(lambda: (yield sides))())
    monkeypatch.setattr(difference, "changed_files", lambda *of: ["kernels/gemm/ours.py"])
    file = tmp_path / "summary" / "static.md"
    done = compared("--markdown", str(file))
    assert done.exit_code == 11, done.output
    assert "LOST TENSOR CORES: gemm/product bf16" in done.output and "FAILS (11); 2 compared" in done.output
    assert "| LOST TENSOR CORES | gemm/product | bf16 |" in file.read_text() and "compile: 4 of 4 in" in done.output
    monkeypatch.setattr(difference, "changed_files", lambda *of: ["README.md"])
    done = compared()
    assert done.exit_code == 0 and "passes (0); the difference reaches no compiled code" in done.output


@pytest.mark.needs("checkout")
def test_a_name_or_an_option_that_does_not_fit_a_comparison_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(difference, "changed_files", lambda *of: ["bench/show.py"])
    for arguments, words in (
        (("nothing", "--compare", "main"), "op: expected one of"),
        (("gemm", "--compare", "main", "--out", str(tmp_path)), "compare: expected no --out with it"),
        (("gemm", "--markdown", str(tmp_path / "a.md")), "markdown: expected --compare"),
    ):
        with pytest.raises(ValueError, match=words):
            CliRunner().invoke(app, ["static", *arguments], catch_exceptions=False)


def test_a_tree_that_cannot_be_read_is_no_new_tree(sides, tmp_path):
    """Else every kernel of a pull request would be new, and would pass.

    `rooflab.kernels.precision` is in this tree and not in the other: no installed module stands in for it.
    """
    tree = make_tree(tmp_path / "lacks", GEMM + "\nimport rooflab.kernels.precision\n")
    (tree / "kernels" / "precision.py").unlink()
    words = r"compare: lacks: (?s:.*)No module named 'rooflab\.kernels\.precision'"
    with side(tree) as lacking, pytest.raises(ValueError, match=words):
        compare_pairs(lacking, sides[1], matched(lacking, sides[1], QUERY), device_for())

"""Compiled code of two trees side by side: what fails a pull request, what is only told, and that no tree leaks."""

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
from rooflab.bench.compile import difference
from rooflab.bench.compile import sides as two
from rooflab.bench.compile.cases import device_for
from rooflab.bench.compile.difference import CodeChange, Query, compare_pairs, markdown, matched
from rooflab.bench.compile.sides import CompiledTree
from rooflab.bench.compile.static import compilers
from rooflab.bench.compile.store import Store, tree_hash
from rooflab.roofline.device import Device

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
SILU = '''"""Kernels that halve."""
import torch, triton, triton.language as tl
from rooflab.kernels.registry import register

@triton.jit
def halve(x, y, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i).to(tl.float32)
    if BROKEN:
        v = v + tl.load(no_such_name)
    tl.store(y + i, (v * tl.sum(tl.exp(v), 0)).to(tl.bfloat16))

def add(name, block, broken=False, short=False, requires=(), **options):
    def kernel(x):
        y = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
        halve[(4,)](x, y, block, broken, **options)
        return y
    refused = lambda inputs: "only short rows" if short and inputs.x.shape[0] > 16 else None
    register(op="silu_and_mul", name=name, role="optimized", backend="triton", unsupported=refused,
             requires=requires)(kernel)

for name, options in KERNELS.items():
    add(name, **options)
'''
BASE = {
    "kept": {"block": 1024},
    "grows": {"block": 512},
    "spills": {"block": 2048, "num_warps": 1},
    "breaks": {"block": 256},
    "repaired": {"block": 256, "broken": True},
    "refuses": {"block": 128},
    "unavailable": {"block": 128, "requires": ("no_such_package",)},
    "dropped": {"block": 2048},
}
HEAD = {
    **{name: options for name, options in BASE.items() if name != "dropped"},
    "grows": {"block": 4096},
    "spills": {"block": 2048, "num_warps": 1, "maxnreg": 32},
    "breaks": {"block": 256, "broken": True},
    "repaired": {"block": 256},
    "refuses": {"block": 128, "short": True},
    "added": {"block": 2048},
}
REFERENCES = "contract spec special captured compare domain gemm silu_and_mul rows rules quantization".split()
"""What the two ops need of the references."""
QUERY = Query(suites=("smollm2_135m",), schemes=("bf16",))


def make_tree(folder: Path, gemm: str, silu: dict[str, dict[str, Any]]) -> Path:
    """A tree of two ops, with this tree's registry and specs."""
    # In the two trees the code of the kernels stands on other lines.
    halving = SILU.replace("KERNELS", repr(silu)).replace("@triton", "\n" * len(silu) + "@triton")
    for layer in ("roofline", "reference", "kernels"):
        (folder / layer).mkdir(parents=True)
        for file in (ROOT / layer).glob("*.py"):
            if layer != "reference" or file.stem in REFERENCES:
                shutil.copy(file, folder / layer)
    for op, text in (("gemm", gemm), ("silu_and_mul", halving)):
        (folder / "kernels" / op).mkdir()
        (folder / "kernels" / op / "__init__.py").write_text('"""An op."""\n')
        (folder / "kernels" / op / "ours.py").write_text(text)
    return folder


def compare_sides(
    base: CompiledTree, head: CompiledTree, query: Query, device: Device, store: Store | None = None
) -> list[CodeChange]:
    return compare_pairs(base, head, matched(base, head, query), device, store)


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
    base = make_tree(folder / "base", GEMM, BASE)
    head = make_tree(folder / "head", GEMM.replace("num_warps=4", "num_warps=2"), HEAD)
    with side(base) as first, side(head) as second:
        yield first, second


@pytest.mark.more
def test_every_kernel_of_either_tree_has_a_verdict_and_its_evidence(sides, tmp_path, monkeypatch):
    store = Store(tmp_path / "static")
    changes = {change.kernel: change for change in compare_sides(*sides, QUERY, device_for(), store)}
    assert {name: change.verdict for name, change in changes.items()} == {
        "product": "LOST TENSOR CORES",
        "kept": "SAME",
        "grows": "CHANGED",
        "spills": "SPILLS",
        "breaks": "DOES NOT COMPILE",
        "repaired": "FIXED",
        "refuses": "GONE",
        "dropped": "GONE",
        "added": "NEW",
        "unavailable": "NOT COMPARED",
    }
    check_evidence(changes)
    check_the_command(*sides, tmp_path, monkeypatch)


def check_evidence(changes: dict[str, CodeChange]) -> None:
    told = {name: "\n".join(change.sentences) for name, change in changes.items()}
    for name, words in (
        ("product", "product: wgmma -> mma"),
        ("product", "num_warps=2 is less than a warpgroup's 4"),  # the option that lost its effect
        ("spills", "bytes of stack a thread"),
        ("breaks", "no_such_name"),
        ("repaired", "no_such_name"),
        ("unavailable", "no_such_package is not installed"),
        ("refuses", "only short rows"),
        ("dropped", "silu_and_mul/dropped has no code of its own for bf16 any more"),
        ("grows", "registers"),
    ):
        assert words in told[name], told[name]
    assert told["kept"] == "", "another line of the source is no other code"
    assert changes["repaired"].now and not changes["repaired"].before
    rows = [line for line in markdown(list(changes.values()), "main").splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].strip("| ") for row in rows][:2] == ["SPILLS", "LOST TENSOR CORES"], "the worst first"
    assert len(rows) == 9 and all(row.count(" | ") == 4 for row in rows), "all that is not the same"


def check_the_command(base: CompiledTree, head: CompiledTree, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(*more: str) -> Any:
        arguments = ["static", "gemm", "--suite", "smollm2_135m", "--scheme", "bf16", "--compare", "main", *more]
        return CliRunner().invoke(app, arguments)

    monkeypatch.setenv("ROOFLAB_CACHE", str(cache))
    monkeypatch.setattr(two, "revision_side", lambda *of: contextmanager(lambda: (yield base))())
    monkeypatch.setattr(two, "own_side", lambda: head)
    monkeypatch.setattr(difference, "changed_files", lambda *of: ["kernels/gemm/ours.py"])
    file = cache / "summary" / "static.md"
    done = compared("--markdown", str(file))
    assert done.exit_code == 11, done.output
    assert "LOST TENSOR CORES: gemm/product bf16" in done.output and "FAILS (11); 1 compared" in done.output
    assert "| LOST TENSOR CORES | gemm/product | bf16 |" in file.read_text() and "compile: 2 of 2 in" in done.output
    monkeypatch.setattr(difference, "changed_files", lambda *of: ["kernels/silu_and_mul/ours.py", "README.md"])
    done = compared()
    assert done.exit_code == 0 and "passes (0); the difference reaches no compiled code" in done.output


def test_a_name_or_an_option_that_does_not_fit_a_comparison_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(difference, "changed_files", lambda *of: ["bench/show.py"])
    for arguments, words in (
        (("nothing", "--compare", "main"), "op: expected one of"),
        (("gemm", "--compare", "main", "--out", str(tmp_path)), "compare: expected kernels in their own configs"),
        (("gemm", "--markdown", str(tmp_path / "a.md")), "markdown: expected --compare"),
    ):
        with pytest.raises(ValueError, match=words):
            CliRunner().invoke(app, ["static", *arguments], catch_exceptions=False)


def test_a_tree_that_cannot_be_read_is_no_new_tree(sides, tmp_path):
    """Else every kernel of a pull request would be new, and would pass.

    `rooflab.kernels.precision` is in this tree and not in the other: no installed module stands in for it.
    """
    tree = make_tree(tmp_path / "lacks", GEMM + "\nimport rooflab.kernels.precision\n", BASE)
    (tree / "kernels" / "precision.py").unlink()
    with side(tree) as lacking:
        with pytest.raises(ValueError, match=r"compare: lacks: (?s:.*)No module named 'rooflab\.kernels\.precision'"):
            compare_sides(lacking, sides[1], QUERY, device_for())

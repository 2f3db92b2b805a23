"""What was compiled is kept on disk: never stale, never half there."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from rooflab.bench.compile import store as store_module
from rooflab.bench.compile.cases import Query
from rooflab.bench.compile.store import Sources, Store, own_sources, select_kept

MESSAGE = {"op": "gemm", "kernel": "tiled", "case": {"M": 1}, "scheme": "bf16", "target": "sm_90a", "config": None}
ANSWER = {"kernels": [{"name": "k", "sass": "x" * 10_000}]}
FILES = {
    "kernels/registry.py": "from rooflab.reference.spec import Case\n",
    "kernels/helpers.py": "VALUE = 1\n",
    "kernels/unused.py": "VALUE = 1\n",
    "kernels/tile.cuh": "// a header\n",
    "kernels/gemm/__init__.py": '"""gemm."""\n',
    "kernels/gemm/_operands.py": "from ..helpers import VALUE\n",
    "kernels/gemm/tiled.py": "def launch():\n    from rooflab.kernels.gemm import _operands\n",
    "kernels/gemm/other.py": "VALUE = 1\n",
    "kernels/gemm/choices.json": "{}",
    "kernels/rope/__init__.py": '"""rope."""\n',
    "kernels/rope/choices.json": "{}",
    "kernels/rope/fused.py": "from rooflab.kernels import registry\n",
    "reference/spec.py": "import rooflab.roofline.model as model\n",
    "reference/gemm.py": "from rooflab.reference import spec\n",
    "reference/rope.py": "from rooflab.reference import spec\n",
    "roofline/model.py": "Cost = 1\n",
    "roofline/plot.py": "Plot = 1\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def tiled(tree: Path) -> str | None:
    return Sources.at(tree).of("rooflab.kernels.gemm.tiled", "gemm")


@pytest.mark.parametrize(
    "name",
    [
        "kernels/gemm/tiled.py",  # itself
        "kernels/gemm/_operands.py",  # imported where it is called
        "kernels/helpers.py",  # imported from there, by a relative name
        "kernels/gemm/__init__.py",  # runs at every import of the op
        "kernels/gemm/other.py",  # beside it
        "kernels/gemm/choices.json",  # a launcher may read it
        "kernels/tile.cuh",  # a source of CUDA may include it
        "reference/gemm.py",  # makes the inputs
        "reference/spec.py",  # imported from there
        "roofline/model.py",  # and from there, as another name
    ],
)
def test_a_change_of_what_a_kernel_depends_on_changes_its_hash(tree, name):
    before = tiled(tree)
    file = tree / name
    file.write_text(file.read_text() + ("\n# changed\n" if name.endswith(".py") else " "))
    assert before is not None and tiled(tree) != before


@pytest.mark.parametrize(
    "name", ["kernels/unused.py", "kernels/rope/fused.py", "kernels/rope/choices.json", "roofline/plot.py"]
)
def test_a_change_of_anything_else_does_not(tree, name):
    before = tiled(tree)
    (tree / name).write_text("something else = 1")
    assert tiled(tree) == before


def test_a_new_file_beside_the_kernel_and_a_renamed_one_change_its_hash(tree):
    before = tiled(tree)
    (tree / "kernels/gemm/new.cu").write_text("")
    added = tiled(tree)
    (tree / "kernels/gemm/new.cu").rename(tree / "kernels/gemm/renamed.cu")
    assert len({before, added, tiled(tree)}) == 3


def test_the_same_tree_elsewhere_has_the_same_hash(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name, text in FILES.items():
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text(text)
    (other / "kernels/gemm/__pycache__").mkdir()
    (other / "kernels/gemm/__pycache__/tiled.pyc").write_bytes(b"x")
    assert tiled(other) == tiled(tree)


@pytest.mark.parametrize(
    ("module", "op"),
    [("mine", "gemm"), ("rooflab.bench.tiled", "gemm"), ("rooflab.kernels.gemm.absent", "gemm")]
    + [("rooflab.kernels.gemm.tiled", "absent"), ("rooflab.reference.gemm", "gemm")],
)
def test_what_is_not_in_the_tree_has_no_hash(tree, module, op):
    assert Sources.at(tree).of(module, op) is None
    assert Store(tree).key(MESSAGE, None) is None


def test_the_hash_of_our_own_kernels_reaches_what_they_import():
    sources = Sources(own_sources().layers)  # the process's own remembers what other tests asked for
    found = sources.of("rooflab.kernels.gemm.tensor_core", "gemm")
    assert found and found != sources.of("rooflab.kernels.rmsnorm.fused", "rmsnorm")
    read = {file.relative_to(sources.layers["kernels"].parent).as_posix() for file in sources._hashes}
    assert {"kernels/_checks.py", "kernels/registry.py", "reference/spec.py", "reference/gemm.py"} <= read
    assert {"kernels/gemm/tensor_core.py", "roofline/model.py", "kernels/configs.py"} <= read
    assert "kernels/rmsnorm/naive.py" in read and not any(name.startswith("kernels/rope/") for name in read)


@pytest.mark.parametrize(
    "change", [{"target": "sm_80"}, {"config": {"block_m": 64}}, {"scheme": "fp16"}, {"case": {"M": 2}}]
)
def test_another_request_is_another_entry(tmp_path, change):
    store = Store(tmp_path)
    assert store.key(MESSAGE, "a") != store.key({**MESSAGE, **change}, "a")
    assert store.key(MESSAGE, "a") == store.key(dict(MESSAGE), "a") != store.key(MESSAGE, "b")


def test_another_toolchain_is_another_entry(tmp_path, monkeypatch):
    store = Store(tmp_path)
    before = store.key(MESSAGE, "a")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert store.key(MESSAGE, "a") == before, "what changes no code"
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert store.key(MESSAGE, "a") != before
    monkeypatch.delenv("DISABLE_LLVM_OPT")
    monkeypatch.setattr(store_module, "_toolchain", lambda: ["triton 9.9"])
    assert store.key(MESSAGE, "a") != before


def test_what_a_toolkit_outside_the_packages_compiles_is_not_kept(monkeypatch):
    monkeypatch.setattr(store_module, "version", lambda package: "13.5")
    assert all(store_module.can_keep(backend) for backend in ("triton", "gluon", "cuda"))
    absent = {"nvidia-cuda-nvrtc": None}

    def version(package: str) -> str:
        if package in absent:
            raise store_module.PackageNotFoundError(package)
        return "13.5"

    monkeypatch.setattr(store_module, "version", version)
    assert store_module.can_keep("triton") and store_module.can_keep("gluon") and not store_module.can_keep("cuda")


def test_a_selection_is_kept_until_anything_changes(tmp_path, monkeypatch):
    query, store = Query("rmsnorm", schemes=("bf16",)), Store(tmp_path)
    first = select_kept(query, store)
    monkeypatch.setattr("rooflab.bench.compile.store.select", lambda *_, **__: pytest.fail("selected again"))
    assert select_kept(query, store) == first and [item.kernel.id for item in first] == ["rmsnorm/fused"]
    assert (store.hits, store.misses) == (0, 0), "it is not counted among what is compiled"
    monkeypatch.setattr("rooflab.bench.compile.store.select", lambda *_, **__: [])
    assert select_kept(query, None) == [], "without a store"
    assert select_kept(Query("rmsnorm", schemes=("fp16",)), store) == [], "another query"
    monkeypatch.setattr(Sources, "all", lambda self: "another tree")
    assert select_kept(query, store) == []
    monkeypatch.setattr(Sources, "of", lambda *_: None)
    assert select_kept(Query("rope"), store) == [] == select_kept(Query("rope"), store), "one from outside: not kept"
    assert len(list(tmp_path.iterdir())) == 3


def test_the_hash_of_a_whole_tree(tree):
    before = Sources.at(tree).all()
    (tree / "roofline" / "plot.py").write_text("Plot = 2")
    changed = Sources.at(tree).all()
    (tree / "kernels" / "__pycache__").mkdir()
    (tree / "kernels" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert changed != before and Sources.at(tree).all() == changed


def test_an_entry_comes_back(tmp_path):
    store = Store(tmp_path / "new" / "folder")
    key = store.key(MESSAGE, "a")
    assert store.read(key) is None and (store.hits, store.misses) == (0, 1)
    store.write(key, ANSWER)
    assert store.read(key) == ANSWER and (store.hits, store.misses) == (1, 1)
    assert [file.suffix for file in store.folder.iterdir()] == [".gz"], "nothing unfinished is left"


@pytest.mark.parametrize("damage", ["empty", "truncated", "not compressed", "not JSON", "another key", "no answer"])
def test_a_damaged_entry_is_none(tmp_path, damage):
    store = Store(tmp_path)
    key = store.key(MESSAGE, "a")
    store.write(key, ANSWER)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "truncated": content[: len(content) // 2],
            "not compressed": gzip.decompress(content),
            "not JSON": gzip.compress(b"{"),
            "another key": gzip.compress(json.dumps({"key": "b", "answer": ANSWER}).encode()),
            "no answer": gzip.compress(json.dumps({"key": key}).encode()),
        }[damage]
    )
    assert store.read(key) is None
    store.write(key, ANSWER)
    assert store.read(key) == ANSWER, "and is replaced"


def test_an_unwritable_folder_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "static")
    assert store.read("0" * 64) is None
    with pytest.raises(ValueError, match="ROOFLAB_CACHE: expected a folder that can be written to.*--no-cache"):
        store.write("0" * 64, ANSWER)


def test_what_nothing_reads_is_deleted_after_a_month(tmp_path):
    store = Store(tmp_path)
    kept, dropped, read = (store.key(MESSAGE, name) for name in "abc")
    for key in (kept, dropped, read):
        store.write(key, ANSWER)
    (tmp_path / "crashed.part").write_text("half")
    old = time.time() - store_module.UNUSED_S - 60
    for name in ("crashed.part", *(f"{key[:40]}.json.gz" for key in (dropped, read))):
        os.utime(tmp_path / name, (old, old))
    assert store.read(read) == ANSWER
    store.prune()
    assert {file.name for file in tmp_path.iterdir()} == {f"{key[:40]}.json.gz" for key in (kept, read)}

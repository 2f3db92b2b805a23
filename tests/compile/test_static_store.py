"""Compiled code is kept on disk: an entry is never out of date and never incomplete."""

from __future__ import annotations

import gzip
from dataclasses import replace

from rooflab.bench.compile.cases import can_keep
from rooflab.bench.compile.static import compile_in
from rooflab.bench.compile.store import Store, tree_hash
from rooflab.bench.core.process import ChildFailed
from rooflab.kernels.registry import get_kernel

MESSAGE = {"op": "gemm", "kernel": "tiled", "case": {"M": 1}, "scheme": "bf16", "target": "sm_90a", "config": None}
ANSWER = {"kernels": [{"name": "k", "sass": "x" * 10_000}]}


def test_a_change_of_any_file_changes_the_hash_of_a_tree(tmp_path):
    names = ("kernels/gemm/tiled.py", "kernels/gemm/choices.json", "kernels/tile.cuh", "reference/gemm.py")
    names += ("roofline/model.py",)
    one, two = tmp_path / "one", tmp_path / "two"
    for tree in (one, two):
        for name in (*names, "bench/static.py"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(name)
    hashes = [tree_hash(one)]
    assert tree_hash(two) == hashes[0], "the same tree elsewhere"
    for name in names:
        (one / name).write_text("changed")
        hashes.append(tree_hash(one))
    (one / names[0]).rename(one / "kernels/gemm/renamed.py")
    hashes.append(tree_hash(one))
    assert len(set(hashes)) == len(hashes)
    (one / "kernels/gemm/__pycache__").mkdir()
    (one / "kernels/gemm/__pycache__/tiled.pyc").write_bytes(b"x")
    (one / "bench/static.py").write_text("changed")
    assert tree_hash(one) == hashes[-1], "no kernel depends on these"


def test_what_a_toolkit_or_a_file_outside_the_tree_decides_is_not_kept():
    kernel = get_kernel("rmsnorm", "fused")
    assert can_keep(kernel) and not can_keep(replace(kernel, fn=lambda x: x))
    assert not can_keep(get_kernel("gemm", "gemv")), "CUDA C++"


def test_another_request_or_toolchain_is_another_entry(tmp_path, monkeypatch):
    store = Store(tmp_path)
    before = store.key(MESSAGE, "a")
    assert before == store.key(dict(MESSAGE), "a") != store.key(MESSAGE, "b")
    for change in ({"target": "sm_80"}, {"config": {"block_m": 64}}, {"scheme": "fp16"}, {"case": {"M": 2}}):
        assert store.key({**MESSAGE, **change}, "a") != before
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert store.key(MESSAGE, "a") == before, "what changes no code"
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert store.key(MESSAGE, "a") != before


def test_a_damaged_entry_is_none_and_is_replaced(tmp_path):
    store = Store(tmp_path)
    key = store.key(MESSAGE, "a")
    store.write(key, ANSWER)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for damage in (b"", content[: len(content) // 2], gzip.decompress(content), gzip.compress(b"{")):
        file.write_bytes(damage)
        assert store.read(key) is None, damage[:20]
        store.write(key, ANSWER)
        assert store.read(key) == ANSWER


def test_what_was_compiled_is_kept_and_what_failed_is_asked_again(tmp_path):
    """Another tree asks for everything."""
    store, asked = Store(tmp_path), []
    broke = {"error": "it broke", "where": "", "refused": False}
    answers = {1: {"kernels": []}, 2: broke, 3: ChildFailed.died(7, "")}

    class Workers:
        def ask_all(self, messages):
            sizes = [message["case"]["M"] for message in messages]
            asked.extend(sizes)
            return [answers[size] for size in sizes]

    messages = [{**MESSAGE, "case": {"M": size}} for size in answers]
    for tree, wanted in (("a", [1, 2, 3]), ("a", [2, 3]), ("b", [1, 2, 3])):
        asked.clear()
        compiled, broken, died = compile_in(Workers(), messages, [True] * 3, tree, store)
        assert asked == wanted and compiled == []
        assert "it broke" in str(broken) and "status 7" in str(died)

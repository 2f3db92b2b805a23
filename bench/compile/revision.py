"""The compiled code of this tree beside that of a git revision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooflab.bench.compile.cases import Selected, select
from rooflab.bench.compile.difference import Change, changed, gone, new, not_compared
from rooflab.bench.compile.sources import Sources, own_sources
from rooflab.bench.compile.static import compile_in
from rooflab.bench.compile.store import Store, can_keep
from rooflab.bench.compile.summary import Summary, summarize
from rooflab.bench.compile.targets import Target
from rooflab.bench.compile.workers import CompileFailure, Workers, own_workers
from rooflab.reference.spec import Case
from rooflab.roofline.device import Device

Item = dict[str, Any]
"""A kernel, a case and a scheme, as `Selected.to_json` gives them."""
Pair = tuple[Item | None, Item | None]
"""What the base has and what the head has in its place."""


@dataclass(frozen=True)
class Query:
    """What to compare: the arguments of `cases.select`, files left out."""

    op: str | None = None
    kernels: tuple[str, ...] = ()
    suites: tuple[str, ...] = ("llama3_8b",)
    cases: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    every_case: bool = False


@dataclass(frozen=True)
class Side:
    """One tree and the processes that compile it."""

    label: str
    workers: Workers
    sources: Sources
    own: bool = False
    """Whether it is the tree that this process runs, whose kernels it knows."""

    def select(self, query: Query) -> list[Item]:
        """What the query picks in this tree.  Raises `ValueError` where the tree cannot be asked."""
        if self.own:
            found = select(query.op, (), query.suites, query.cases, query.schemes, every_case=query.every_case)
            return _named(query, map(Selected.to_json, found))
        message = {
            "do": "select",
            "op": query.op,
            "suites": list(query.suites),
            "cases": list(query.cases),
            "schemes": list(query.schemes),
            "every_case": query.every_case,
        }
        try:
            answer = self.workers.ask(message)
        except CompileFailure as failure:
            raise ValueError(f"compare: {self.label}: {failure}") from failure
        if "error" in answer:
            raise ValueError(f"compare: {self.label}: {answer['error']}")
        return _named(query, answer["selected"])


def _named(query: Query, items: Iterable[Item]) -> list[Item]:
    return [item for item in items if not query.kernels or item["kernel"] in query.kernels]


@contextmanager
def revision_side(root: Path, revision: str) -> Iterator[Side]:
    """The tree of `revision`, in a worktree that is gone afterwards.  Raises `ValueError` where git knows none."""
    from rooflab.bench.records.revisions import checked_out, git

    # The same compilers for both sides, whatever the revision pins: what differs is then the kernels' doing.
    with checked_out(root, revision, keep_environment=True) as tree:
        path = tree.path / git(root, "rev-parse", "--show-prefix")
        if not (path / "kernels").is_dir() or not (path / "reference").is_dir():
            raise ValueError(f"compare: expected a revision with the folders kernels and reference, got {revision!r}")
        workers = Workers(path)
        try:
            yield Side(tree.label, workers, Sources.at(path))
        finally:
            workers.stop()


def own_side() -> Side:
    """The tree that this process runs, uncommitted changes included."""
    return Side("the working tree", own_workers(), own_sources(), own=True)


def compare_sides(
    base: Side, head: Side, query: Query, target: Target, device: Device, store: Store | None = None
) -> list[Change]:
    """Everything that the query picks in either tree, `head` against `base`, in order of op, kernel and dtype.

    Raises `ValueError` where it picks nothing, or a tree cannot be asked.
    """
    before, after = base.select(query), head.select(query)
    theirs = {_key(item): item for item in after}
    known = {_key(item) for item in before}
    # At the base's cases, so that both sides do the same work.
    pairs: list[Pair] = [(item, _at(item, theirs.get(_key(item)))) for item in before]
    pairs += [(None, item) for item in after if _key(item) not in known]
    if not pairs:
        raise ValueError(f"compare: expected kernels with code of their own, got none in {base.label} and {head.label}")
    old = _compile(base, [item for item, _ in pairs if item is not None], target, device, store)
    broken = [result for result in old.values() if isinstance(result, CompileFailure) and not result.refused]
    if broken and not any(isinstance(result, list) for result in old.values()):
        # One kernel that did not compile was broken; all of them is a tree that this bench cannot read.
        raise ValueError(f"compare: nothing of {base.label} compiles here: {broken[0]}")
    now = _compile(head, [item for _, item in pairs if item is not None], target, device, store)
    changes = [_change(pair, old, now) for pair in pairs]
    return sorted(changes, key=lambda change: (change.op, change.kernel, change.scheme, change.case_id))


def _at(item: Item, other: Item | None) -> Item | None:
    """The other tree's kernel at this item's case; at its own where the op's cases have other keys there."""
    if other is None or set(other["case"]) != set(item["case"]):
        return other
    return {**other, "case": item["case"]}


def _key(item: Item) -> tuple[str, str, str]:
    return item["op"], item["kernel"], item["scheme"]


def _id(item: Item) -> tuple[str, str, str, str]:
    return (*_key(item), Case(**item["case"]).id)


Results = dict[tuple[str, str, str, str], list[Summary] | CompileFailure]


def _compile(side: Side, items: Sequence[Item], target: Target, device: Device, store: Store | None) -> Results:
    messages = [
        {
            "do": "compile",
            **{name: item[name] for name in ("op", "kernel", "case", "scheme")},
            "file": None,
            "config": None,
            "target": target.name,
            "sm": target.sm,
            "properties": target.properties(),
        }
        for item in items
    ]
    modules = [item["module"] if can_keep(item["backend"]) else None for item in items]
    found = compile_in(side.workers, side.sources, messages, modules, store)
    return {
        _id(item): result
        if isinstance(result, CompileFailure)
        else [summarize(info, item["scheme"], device) for info in result]
        for item, result in zip(items, found, strict=True)
    }


def _change(pair: Pair, before: Results, after: Results) -> Change:
    base, head = pair
    if base is None:
        assert head is not None, "a pair has a side"
        return new(_id(head), after[_id(head)])
    if head is None:
        name = f"{base['op']}/{base['kernel']}"
        return gone(_id(base), f"{name} has no code of its own for {base['scheme']} any more, or takes no such case")
    result = after[_id(head)]
    if isinstance(result, CompileFailure) and result.refused:
        was = before[_id(base)]
        refused_before = isinstance(was, CompileFailure) and was.refused
        return not_compared(_id(base), str(result)) if refused_before else gone(_id(base), str(result))
    note = "" if _id(head) == _id(base) else f"the op's cases have other keys: before {_id(base)[3]}"
    return changed(_id(head), before[_id(base)], result, note)

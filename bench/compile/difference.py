"""Compares the compiled code of kernels between two source trees, and decides which differences fail a pull request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Literal

from rooflab.bench.base.plain import Marked, markdown_cell, markdown_code, markdown_table
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.compile.cases import Query
from rooflab.bench.compile.compiled_sides import CompiledTree, Item
from rooflab.bench.compile.sass import TENSOR_CORES
from rooflab.bench.compile.static import CompileFailure, compile_in
from rooflab.bench.compile.store import Store
from rooflab.bench.compile.summary import Summary, summarize
from rooflab.bench.revisions.changes import touched_files, touched_ops, users
from rooflab.bench.revisions.trees import changed_files
from rooflab.reference.spec import Case
from rooflab.roofline.device import Device

Verdict = Literal[
    "SAME", "CHANGED", "NEW", "FIXED", "SPILLS", "LOST TENSOR CORES", "DOES NOT COMPILE", "GONE", "NOT COMPARED"
]
FAILING_VERDICTS: tuple[Verdict, ...] = ("SPILLS", "LOST TENSOR CORES", "DOES NOT COMPILE")
CaseIdentity = tuple[str, str, str, str]
"""The op, kernel, scheme and case that identify an item in both trees."""
_MMA_KINDS = (*TENSOR_CORES, "none")
_BASE_VERDICTS: tuple[Verdict, Verdict] = "FIXED", "NOT COMPARED"
"""The verdicts if only the base does not compile: FIXED if the compilation fails, NOT COMPARED on a refusal."""


@dataclass(frozen=True)
class CodeChange:
    """Describes how a kernel's code differs between two source trees, for one input case and one dtype scheme."""

    op: str
    kernel: str
    scheme: str
    case_id: str
    verdict: Verdict
    """SAME: the same machine code on the same grids.  CHANGED: different code, without a difference that fails.  NOT
    COMPARED: a side refuses the case, for example because a package is not installed."""
    sentences: tuple[str, ...]
    """The differences, written as `before -> now`.  The reason for the verdict comes first."""
    before: tuple[Summary, ...] = ()
    now: tuple[Summary, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of this object as JSON values."""
        sides = {"before": [s.to_json() for s in self.before], "now": [s.to_json() for s in self.now]}
        return {**{k: v for k, v in asdict(self).items() if k not in sides}, "sentences": list(self.sentences), **sides}


def exit_status(changes: Sequence[CodeChange], untouched: bool = False) -> ExitStatus:
    """Returns the exit status of a comparison of compiled kernels.

    11: a kernel has new spills, lost its tensor cores or does not compile.  13: a kernel no longer exists, or nothing
    was compared.  0: everything else.  With `untouched`, it is no error that nothing was compared."""
    verdicts = {code_change.verdict for code_change in changes}
    if verdicts & set(FAILING_VERDICTS):
        return ExitStatus.INCORRECT
    is_uncompared = verdicts <= {"NOT COMPARED"} and not untouched
    return ExitStatus.INVALID if "GONE" in verdicts or is_uncompared else ExitStatus.DONE


_VERDICT_WORDS: dict[Verdict, str] = {
    "SAME": "with the same code",
    "CHANGED": "changed",
    "NEW": "new",
    "FIXED": "that did not compile before",
    "SPILLS": "with new spills",
    "LOST TENSOR CORES": "without the tensor cores they had",
    "DOES NOT COMPILE": "not compiling",
    "GONE": "gone",
    "NOT COMPARED": "not compared",
}


def summary_line(changes: Sequence[CodeChange], base: str, untouched: bool = False) -> str:
    """Returns one line with the number of kernels for each verdict."""
    verdict_counts = Counter(code_change.verdict for code_change in changes)
    parts = ", ".join(f"{verdict_counts[verdict]} {verdict_words}" for verdict, verdict_words in _VERDICT_WORDS.items())
    exit_code = exit_status(changes, untouched)
    line = f"compiled code against {base}: {'FAILS' if exit_code else 'passes'} ({exit_code}); "
    if untouched and not changes:
        return line + "the difference reaches no compiled code"
    return f"{line}{len(changes)} compared: {parts}" + ("; the difference reaches no other code" if untouched else "")


def new(identity: CaseIdentity, now: list[Summary] | CompileFailure) -> CodeChange:
    """Returns the verdict on a kernel that the new source tree has and the old one lacks."""
    if isinstance(now, CompileFailure):
        return CodeChange(*identity, "NOT COMPARED" if now.refused else "DOES NOT COMPILE", (str(now),))
    spill_texts = [f"{launch.name} spills {launch.stack_bytes} bytes a thread" for launch in now if launch.stack_bytes]
    return CodeChange(*identity, "NEW", (*spill_texts, *_findings((), now)), (), tuple(now))


def changed(
    identity: CaseIdentity, before: list[Summary] | CompileFailure, now: list[Summary] | CompileFailure, note: str = ""
) -> CodeChange:
    """Returns the verdict for a kernel that exists in both trees.  `note` is an extra sentence for the verdict."""
    if isinstance(now, CompileFailure):
        extra_sentences = ("it did not compile before either",) if isinstance(before, CompileFailure) else ()
        return CodeChange(*identity, "DOES NOT COMPILE", (str(now), *extra_sentences))
    if isinstance(before, CompileFailure):
        return CodeChange(*identity, _BASE_VERDICTS[before.refused], (f"before: {before}",), (), tuple(now))
    given_notes = (note,) if note else ()
    if Counter(map(_activity, before)) == Counter(map(_activity, now)):
        return CodeChange(*identity, "SAME", given_notes, tuple(before), tuple(now))
    launch_pairs = _aligned(before, now)
    compared_pairs = launch_pairs or [(min(before, key=_rank), min(now, key=_rank))]
    stack_getter = attrgetter("stack_bytes")
    spill_pairs = launch_pairs or [(max(before, key=stack_getter), max(now, key=stack_getter))]
    lost_paths = [
        f"{new_code.name}: {old_code.tensor_path} -> {new_code.tensor_path}"
        for old_code, new_code in compared_pairs
        if _rank(new_code) > _rank(old_code)
    ]
    spill_texts = [
        _spills(old_code, new_code) for old_code, new_code in spill_pairs if new_code.stack_bytes > old_code.stack_bytes
    ]
    verdict: Verdict = "LOST TENSOR CORES" if lost_paths else "SPILLS" if spill_texts else "CHANGED"
    other_changes = [
        change_text for old_code, new_code in launch_pairs for change_text in _sentences(old_code, new_code)
    ]
    if [s.name for s in before] != [s.name for s in now]:
        other_changes.insert(0, f"launches {', '.join(s.name for s in before)} -> {', '.join(s.name for s in now)}")
    sentences = (*lost_paths, *spill_texts, *other_changes, *_findings(before, now), *given_notes)
    return CodeChange(
        *identity, verdict, sentences or ("the code differs in nothing counted",), tuple(before), tuple(now)
    )


def _activity(summary: Summary) -> tuple[Any, ...]:
    return summary.name, summary.code_hash, summary.grid, summary.threads, summary.shared_bytes, summary.launches


def _aligned(before: list[Summary], now: list[Summary]) -> list[tuple[Summary, Summary]]:
    """Pairs the kernel launches of two source trees, by kernel name if the names agree, else by order.  Returns [] if
    the trees have different numbers of launches."""
    if len(before) != len(now):
        return []
    if sorted(launch.name for launch in before) == sorted(launch.name for launch in now):
        before, now = (sorted(launches, key=lambda summary: summary.name) for launches in (before, now))
    return list(zip(before, now, strict=True))


def _rank(summary: Summary) -> int:
    return _MMA_KINDS.index(summary.tensor_path)


def _spills(was: Summary, is_: Summary) -> str:
    spill_text = f"{is_.spill_loads} LDL and {is_.spill_stores} STL"
    return f"{is_.name}: {was.stack_bytes} -> {is_.stack_bytes} bytes of stack a thread ({spill_text})"


_SUMMARY_FIELDS: tuple[tuple[str, Callable[[Summary], Any]], ...] = (
    ("registers", lambda s: s.registers),
    ("stack bytes", lambda s: s.stack_bytes),
    ("shared bytes", lambda s: s.shared_bytes),
    ("threads", lambda s: s.threads),
    ("CTAs per SM", lambda s: s.ctas_per_sm),
    ("grid", lambda s: "x".join(map(str, s.grid))),
    ("waves", lambda s: None if s.waves is None else round(s.waves, 2)),
    ("tensor cores", lambda s: s.tensor_path),
    ("wgmma in the loop", lambda s: s.in_loop.get("wgmma", 0)),
    ("mma in the loop", lambda s: s.in_loop.get("mma", 0)),
    ("TMA in the loop", lambda s: s.in_loop.get("tma", 0)),
    ("cp.async in the loop", lambda s: s.in_loop.get("cp_async", 0)),
    ("ldmatrix in the loop", lambda s: s.in_loop.get("ldmatrix", 0)),
    ("instructions in the loop", lambda s: s.loop["instructions"] if s.loop else None),
    ("usual bytes a load", lambda s: s.load_bytes_usual),
    ("narrowest load in the loop", lambda s: s.loop["load_bytes_worst"] if s.loop else None),
)


def _sentences(was: Summary, is_: Summary) -> list[str]:
    figure_values = [(name, getter(was), getter(is_)) for name, getter in _SUMMARY_FIELDS]
    return [f"{name} {old_value} -> {now}" for name, old_value, now in figure_values if old_value != now]


def _findings(before: Sequence[Summary], now: Sequence[Summary]) -> list[str]:
    """Returns sentences on compile options, such as pipelining, that have lost their effect or take effect again."""
    failed_names = {option.name for launch in before for option in launch.options if not option.took_effect}
    failing_options = {option.name: option for launch in now for option in launch.options if not option.took_effect}
    new_sentences = [option.sentence for name, option in failing_options.items() if name not in failed_names]
    effective_names = {option.name for launch in now for option in launch.options if option.took_effect}
    return new_sentences + [
        f"{name} takes effect now" for name in sorted((failed_names - failing_options.keys()) & effective_names)
    ]


def markdown(changes: Sequence[CodeChange], base: str, untouched: bool = False) -> str:
    """Returns the text for a pull request: the verdict, and a table of all kernels without the verdict SAME."""
    shown_changes = [change for change in changes if change.verdict != "SAME"]
    verdict_order = (*FAILING_VERDICTS, "GONE", "CHANGED", "FIXED", "NEW", "NOT COMPARED")
    page_lines = ["### Compiled code", "", summary_line(changes, base, untouched), ""]
    rows = []
    for change in sorted(shown_changes, key=lambda change: verdict_order.index(change.verdict)):
        text_cell = Marked("<br>".join(map(markdown_cell, change.sentences)))
        kernel, case = f"{change.op}/{change.kernel}", markdown_code(change.case_id)
        rows.append((change.verdict, kernel, change.scheme, case, text_cell))
    page_lines += markdown_table(("verdict", "kernel", "dtype", "case", "what"), rows) if shown_changes else []
    return "\n".join(page_lines).rstrip() + "\n"


ItemPair = tuple[Item | None, Item | None]
"""The base's item and the matching item of the head; None if a tree has no such item."""


def reached(base: CompiledTree, head: CompiledTree, query: Query, revision: str) -> tuple[list[ItemPair], bool]:
    """Returns the selected kernels affected by changes since `revision`, and whether there are unaffected kernels."""
    changed_paths, tree_paths = changed_files(head.path, revision), (base.path, head.path)
    if not head.within:
        ops = sorted({folder.name for tree in tree_paths for folder in (tree / "kernels").iterdir() if folder.is_dir()})
        affected_names = {*touched_ops(changed_paths, ops, users(tree_paths, ops))}
        if not affected_names:
            if query != Query():
                query.select()  # refuses names that are not there
            return [], True
    all_pairs = matched(base, head, query)
    if head.within:
        part_names = {item["part"] for pair in all_pairs for item in pair if item}
        affected_names = touched_files(changed_paths, part_names, tree_paths, head.path)
    touched_pairs = [pair for pair in all_pairs if any(item and item["part"] in affected_names for item in pair)]
    return touched_pairs, len(touched_pairs) < len(all_pairs)


def matched(base: CompiledTree, head: CompiledTree, query: Query) -> list[ItemPair]:
    """Pairs the cases that `query` selects in two trees.  Raises `ValueError` if no case exists or a process fails."""
    base_items, head_items = base.select(query), head.select(query)
    head_by_key: dict[tuple[str, ...], Item] = {_key(item): item for item in head_items}
    head_by_key |= {_id(item): item for item in head_items}  # of several cases each is paired with itself
    base_keys = {_key(item) for item in base_items}
    # Both sides compile the base's cases, so that they do the same work.
    item_pairs: list[ItemPair] = [
        (item, head_by_key.get(_id(item)) or _at(item, head_by_key.get(_key(item)))) for item in base_items
    ]
    item_pairs += [(None, item) for item in head_items if _key(item) not in base_keys]
    if not item_pairs:
        raise ValueError(f"compare: expected kernels with code of their own, got none in {base.label} and {head.label}")
    return item_pairs


def compare_pairs(
    base: CompiledTree,
    head: CompiledTree,
    pairs: Sequence[ItemPair],
    device: Device,
    store: Store | None = None,
    done: Callable[[str], None] = lambda text: None,
) -> list[CodeChange]:
    """Compares the compiled code of each pair of kernel cases.  Sorts the result by op, kernel, scheme and case.

    Calls `done` after each compilation.  Raises `ValueError` if no kernel of the base tree compiles."""
    base_results = _compile(base, [item for item, _ in pairs if item is not None], device, store, done)
    failures = [result for result in base_results.values() if isinstance(result, CompileFailure) and not result.refused]
    if failures and not any(isinstance(result, list) for result in base_results.values()):
        # One failure means a broken kernel; if every kernel fails, this bench cannot read the tree.
        raise ValueError(f"compare: nothing of {base.label} compiles here: {failures[0]}")
    head_results = _compile(head, [item for _, item in pairs if item is not None], device, store, done)
    code_changes = [_change(item_pair, base_results, head_results) for item_pair in pairs]
    return sorted(code_changes, key=lambda change: (change.op, change.kernel, change.scheme, change.case_id))


def _at(item: Item, other: Item | None) -> Item | None:
    """Returns the task `other` with the case of the task `item`; unchanged if the cases' keys (`M`, `N`...) differ."""
    if other is None or set(other["case"]) != set(item["case"]):
        return other
    return {**other, "case": item["case"]}


def _key(item: Item) -> tuple[str, str, str]:
    return item["op"], item["kernel"], item["scheme"]


def _id(item: Item) -> CaseIdentity:
    return (*_key(item), Case(**item["case"]).id)


Results = dict[CaseIdentity, list[Summary] | CompileFailure]


def _compile(
    side: CompiledTree, items: Sequence[Item], device: Device, store: Store | None, done: Callable[[str], None]
) -> Results:
    compile_requests = [{name: value for name, value in item.items() if name not in ("kept", "part")} for item in items]
    worker_messages = [{"do": "compile", **compile_request, **side.within} for compile_request in compile_requests]
    results = compile_in(side.workers, worker_messages, [item["kept"] for item in items], side.tree, store, done)
    return {
        _id(item): result
        if isinstance(result, CompileFailure)
        else [summarize(launch_info, item["scheme"], device) for launch_info in result]
        for item, result in zip(items, results, strict=True)
    }


def _change(pair: ItemPair, before: Results, after: Results) -> CodeChange:
    base, head = pair
    if base is None:
        assert head is not None, "a pair has a side"
        return new(_id(head), after[_id(head)])
    if head is None:
        name = f"{base['op']}/{base['kernel']}"
        reason = f"{name} has no code of its own for {base['scheme']} any more, or takes no such case"
        return CodeChange(*_id(base), "GONE", (reason,))
    result = after[_id(head)]
    if isinstance(result, CompileFailure) and result.refused:
        base_result = before[_id(base)]
        is_base_refused = isinstance(base_result, CompileFailure) and base_result.refused
        return CodeChange(*_id(base), "NOT COMPARED" if is_base_refused else "GONE", (str(result),))
    note = "" if _id(head) == _id(base) else f"the op's cases have other keys: before {_id(base)[3]}"
    return changed(_id(head), before[_id(base)], result, note)

"""Mutants of PTX: one wait, fence, barrier, commit or arrival dropped or weakened at a time.

Statements that the text itself shows to be idle are left out, but counted in the names of the other mutants.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

STATEMENT = re.compile(
    r"(?P<guard>@!?[%\w$]+\s+)?"
    r"\b(?P<opcode>(?:bar|barrier|wgmma|cp|fence|membar|mbarrier|atom|red|ld|st)\.[\w.:]+)"
    r"(?P<operands>[^;{}\n]*);"
)
FEWER_BYTES = 16
"""What an expect_tx is made wrong by: the least that a TMA box has."""


@dataclass(frozen=True)
class Mutant:
    """A PTX text that one change sets apart from the original."""

    name: str
    """What was done to which: `drop bar.sync 3`; counted from 1 in the order of the text."""
    text: str
    line: int
    """The PTX line."""


@dataclass(frozen=True)
class _Statement:
    start: int
    end: int
    guard: str
    opcode: str
    operands: str

    @property
    def arguments(self) -> list[str]:
        return [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", self.operands.strip())]

    def written(self, *, opcode: str | None = None, operands: str | None = None) -> str:
        """The statement with parts of it replaced."""
        rest = self.operands.strip() if operands is None else operands
        return f"{self.guard}{f'{opcode or self.opcode} {rest}'.strip()};"


Change = Callable[[_Statement], str]


def _dropped(statement: _Statement) -> str:
    return ""


def _pending_one_more(statement: _Statement) -> str:
    return statement.written(operands=str(int(statement.operands) + 1))


def _done(statement: _Statement) -> str:
    """A wait on an mbarrier that says at once that the phase is over."""
    return f"{statement.guard}setp.eq.u32 {statement.arguments[0]}, 0, 0;"


def _other_parity(statement: _Statement) -> str:
    target, where, parity = statement.arguments[:3]
    changed = f"xor.b32 %mutated, {parity}, 1; {statement.written(operands=f'{target}, {where}, %mutated')}"
    return "{ .reg .b32 %mutated; " + changed + " }"


def _fewer_bytes(statement: _Statement) -> str:
    *others, size = statement.arguments
    changed = f"sub.u32 %mutated, {size}, {FEWER_BYTES}; {statement.written(operands=', '.join([*others, '%mutated']))}"
    return "{ .reg .u32 %mutated; " + changed + " }"


def _unarrived(statement: _Statement) -> str:
    target = statement.arguments[0]
    return f"mov.u64 {target}, 0;" if target.startswith("%") else ""


def _arrives_only(statement: _Statement) -> str:
    return statement.written(opcode=statement.opcode.replace(".sync", ".arrive"))


def _without_order(statement: _Statement) -> str:
    return statement.written(opcode=re.sub(r"\.(acq_rel|acquire|release)\b", ".relaxed", statement.opcode))


def _within_cta(statement: _Statement) -> str:
    return statement.written(opcode=re.sub(r"\.(gpu|sys|gl)\b", ".cta", statement.opcode))


_RULES: tuple[tuple[str, str, Change], ...] = (
    (r"(bar|barrier(\.cta)?)\.(sync|arrive)\b.*", "drop", _dropped),
    (r"(bar|barrier(\.cta)?)\.sync\b.*", "arrive only at", _arrives_only),
    (r"bar\.warp\.sync", "drop", _dropped),
    (r"barrier\.cluster\..*", "drop", _dropped),
    (r"barrier\.cluster\.arrive\.release\b.*", "relax", _without_order),
    (r"wgmma\.(fence|commit_group|wait_group)\..*", "drop", _dropped),
    (r"wgmma\.wait_group\..*", "one more pending in", _pending_one_more),
    (r"cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all)(\.read)?", "drop", _dropped),
    (r"cp\.async\.(bulk\.)?wait_group(\.read)?", "one more pending in", _pending_one_more),
    (r"cp\.async\.bulk\.wait_group", "wait for reads alone in", lambda it: it.written(opcode=it.opcode + ".read")),
    (r"cp\.async\.mbarrier\.arrive\..*", "drop", _dropped),
    (r"fence\.(proxy|mbarrier_init)\b.*", "drop", _dropped),
    (r"(fence\.(acq_rel|sc)|membar)\..*", "drop", _dropped),
    (r"(fence\.(acq_rel|sc)\.(gpu|sys)|membar\.(gl|sys))", "for the CTA alone", _within_cta),
    (r"(atom|red|ld|st)\..*\b(acq_rel|acquire|release)\b.*", "relax", _without_order),
    (r"mbarrier\.init\..*", "drop", _dropped),
    (r"mbarrier\.(try_wait|test_wait)\..*", "do not wait in", _done),
    (r"mbarrier\.(try_wait|test_wait)\.parity\..*", "other parity in", _other_parity),
    (r"mbarrier\.(arrive|arrive_drop)\..*", "drop", _unarrived),
    (r"mbarrier\.expect_tx\..*", "drop", _dropped),
    (r"mbarrier\.(arrive\.)?expect_tx\..*", "fewer bytes in", _fewer_bytes),
)


def mutants(ptx: str) -> Iterator[Mutant]:
    """All mutants of a PTX text, in the order of its statements."""
    counts: Counter[str] = Counter()
    statements = list(_statements(ptx))
    idle = _repeated_initialisations(statements) | _empty_groups(statements)
    for number, statement in enumerate(statements):
        rules = [rule for rule in _RULES if re.fullmatch(rule[0], statement.opcode)]
        if not rules:
            continue
        short = _short(statement.opcode)
        counts[short] += 1
        if number in idle:
            continue
        line = ptx.count("\n", 0, statement.start) + 1
        for _, what, change in rules:
            if what == "arrive only at" and len(statement.arguments) < 2:
                continue  # without a count of threads there is no bar.arrive
            text = ptx[: statement.start] + change(statement) + ptx[statement.end :]
            yield Mutant(f"{what} {short} {counts[short]}", text, line)


def _repeated_initialisations(statements: Sequence[_Statement]) -> set[int]:
    """Those of an mbarrier that is initialised again to the same, with nothing between but barriers and more of them:
    each of these makes the others idle.  Triton repeats those of mbarriers that it shares out to several channels."""
    idle: set[int] = set()
    same: dict[str, list[int]] = {}
    for number, statement in enumerate(statements):
        if statement.opcode.startswith("mbarrier.init."):
            same.setdefault(statement.operands, []).append(number)
        elif not statement.opcode.startswith(("bar.sync", "barrier.sync")):
            idle |= {number for numbers in same.values() if len(numbers) > 1 for number in numbers}
            same = {}
    return idle


def _empty_groups(statements: Sequence[_Statement]) -> set[int]:
    """Commits and waits of bulk copies right after a tensor map was acquired, where there is no copy: Triton writes
    `commit_group` and `wait_group.read 0` with every such fence."""
    idle: set[int] = set()
    acquired = False
    for number, statement in enumerate(statements):
        empty = acquired and re.match(r"cp\.async\.bulk\.(commit|wait)_group", statement.opcode) is not None
        acquired = statement.opcode.startswith("fence.proxy.tensormap") or (empty and "commit" in statement.opcode)
        idle |= {number} if empty else set()
    return idle


def _statements(ptx: str) -> Iterator[_Statement]:
    for found in STATEMENT.finditer(ptx):
        line = ptx[ptx.rfind("\n", 0, found.start()) + 1 : found.start()]
        if "//" not in line:
            guard = found["guard"] or ""
            yield _Statement(found.start(), found.end(), guard, found["opcode"], found["operands"])


def _short(opcode: str) -> str:
    """`wgmma.wait_group` of `wgmma.wait_group.sync.aligned`."""
    kept = re.match(
        r"cp\.async\.bulk\.\w+|cp\.async\.mbarrier\.arrive|mbarrier\.arrive\.expect_tx|fence\.proxy\.async|"
        r"barrier\.cluster\.\w+|bar\.warp\.sync|cp\.async\.\w+|\w+\.\w+",
        opcode,
    )
    assert kept is not None
    return kept[0]

"""Analyses the control flow of SASS code: basic blocks, natural loops, and the loop that takes the most time.

Loops are found as usual (Aho, Lam, Sethi, Ullman, "Compilers", 2nd edition, 9.6).  A back edge goes from a basic block
to its dominator, the head.  The loop consists of the blocks that reach the back edge without passing the head.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from rooflab.bench.compile.sass import TENSOR_CORES, SassFunction, SassInstruction, count_families

_START = -1
"""An additional node of the flow graph, before all entries of a function."""
_END_OPCODES = ("EXIT", "RET", "KILL")
_BRANCH_OPCODES = ("BRA", "JMP", "BRX", "BRXU", "JMX", "JMXU")
_INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")
_WAITS = ("SYNCS", "USETMAXREG", "NANOSLEEP", "CCTL", "UCGABAR_WAIT")
_WORK = ("wgmma", "mma", "tma", "cp_async", "ldmatrix", "global_store", "shared_store", "atomic")
_LONGEST_WAIT = 24
"""A loop with more instructions is no waiting loop.  On sm_90a a polling loop has four to nine instructions."""
_TARGET = re.compile(r"`\(([^)]+)\)|\b(0x[0-9a-f]+)\b")
_CONDITION = re.compile(r"^!?U?P\d\b")


@dataclass(frozen=True)
class Loop:
    """One natural loop of a kernel's code."""

    start: int
    """The address of the loop's head."""
    depth: int
    """The nesting depth: 1 for an outermost loop."""
    innermost: bool
    """Whether the loop contains no other loop, except loops that only wait."""
    waits: bool
    """Whether the loop only polls a barrier, a register budget or a flag."""
    instructions: tuple[SassInstruction, ...]
    """The instructions in order of address, including those of inner loops."""

    @cached_property
    def opcodes(self) -> Mapping[str, int]:
        """The number of occurrences of each opcode in the loop."""
        return Counter(instruction.opcode for instruction in self.instructions)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of instructions of each family of `sass.FAMILIES`."""
        return count_families(self.opcodes.items())

    @property
    def tensor_core_instructions(self) -> int:
        """Returns the number of tensor-core instructions in the loop."""
        return sum(self.counts[family] for family in TENSOR_CORES)

    @property
    def global_loads(self) -> int:
        """Returns the number of loads from global memory in the loop, to registers or to shared memory."""
        return self.counts["global_load"] + self.counts["cp_async"] + self.counts["tma"]


def find_loops(function: SassFunction) -> list[Loop]:
    """Returns every reachable loop of `function`, sorted by address."""
    blocks, entries = _blocks(function)
    bodies = _natural_loops(blocks, entries)
    code = {
        head: tuple(instruction for block in sorted(body) for instruction in blocks[block].instructions)
        for head, body in bodies.items()
    }
    waits = {head: _only_waits(instructions) for head, instructions in code.items()}
    loops = []
    for head, body in sorted(bodies.items()):
        outer_heads = [other for other, outer in bodies.items() if other != head and body < outer]
        nested = [other for other, inner in bodies.items() if other != head and inner < body and not waits[other]]
        loops.append(Loop(head, len(outer_heads) + 1, not nested and not waits[head], waits[head], code[head]))
    return loops


def hot_loop(loops: Sequence[Loop]) -> Loop | None:
    """Returns the innermost loop with the most tensor-core instructions; None if there is no loop.  Without tensor-core
    instructions, returns the one with the most global loads; without global loads, the one with the most instructions.
    """
    inner = [loop for loop in loops if loop.innermost]
    return max(
        inner, key=lambda loop: (loop.tensor_core_instructions, loop.global_loads, len(loop.instructions)), default=None
    )


def feeding_loop(loops: Sequence[Loop], hot: Loop | None) -> Loop | None:
    """For warp-specialised code, returns the innermost loop in which other warps load data for `hot`; else None."""
    if hot is None or hot.counts["tma"] or hot.counts["cp_async"]:
        return None
    other_loops = [loop for loop in loops if loop.innermost and loop is not hot]
    feeding = [loop for loop in other_loops if loop.counts["tma"] or loop.counts["cp_async"]]
    return max(feeding, key=lambda loop: loop.counts["tma"] + loop.counts["cp_async"], default=None)


@dataclass
class _Block:
    instructions: list[SassInstruction]
    successors: set[int]


def _blocks(function: SassFunction) -> tuple[dict[int, _Block], set[int]]:
    """Returns the basic blocks, by the address of their first instruction.  Also returns the entry addresses: the start
    of the kernel and of each function that the kernel calls."""
    code = function.instructions
    targets = {i.address: _targets(i, function) for i in code if i.name in (*_BRANCH_OPCODES, "CALL")}
    referred = {target for addresses in targets.values() for target in addresses}
    # No instruction shows the targets of an indirect branch, so every label that nothing refers to counts as one.
    elsewhere = {a for label, a in function.labels.items() if label.startswith(".L") and a not in referred}
    starts = {code[0].address, *function.labels.values(), *referred}
    blocks: dict[int, _Block] = {}
    for instruction, following in zip(code, (*code[1:], None), strict=True):
        if instruction.address in starts:
            current = blocks[instruction.address] = _Block([], set())
        current.instructions.append(instruction)
        if instruction.name in _INDIRECT and not targets[instruction.address]:
            current.successors = set(elsewhere)
        elif _ends_block(instruction) or (following is not None and following.address in starts):
            current.successors = _successors(instruction, following, targets)
        else:
            continue
        if following is not None:
            starts.add(following.address)
    entries = {code[0].address, *(t for i in code if i.name == "CALL" for t in targets[i.address])}
    return blocks, entries


def _ends_block(instruction: SassInstruction) -> bool:
    return instruction.name in (*_END_OPCODES, *_BRANCH_OPCODES)


def _targets(instruction: SassInstruction, function: SassFunction) -> list[int]:
    if instruction.name in _INDIRECT:
        return list(function.indirect.get(instruction.address, ()))
    addresses = []
    for label, address in _TARGET.findall(instruction.operands):
        if label in function.labels:
            addresses.append(function.labels[label])
        elif address:
            addresses.append(int(address, 16))
    return addresses


def _successors(last: SassInstruction, following: SassInstruction | None, targets: Mapping[int, list[int]]) -> set[int]:
    # `BRA.DIV` branches only where threads have diverged; `BRA P0, L` and `BRA.U !UP0, L` branch on an operand.
    conditional = bool(last.guard) or ".DIV" in last.opcode or _CONDITION.match(last.operands)
    # `BRA.U.ANY` repeats an instruction that takes one address for every lane that has an address: not a loop of the
    # source.
    serial = last.opcode.endswith(".U.ANY")
    jumps = set(targets[last.address]) if last.name in _BRANCH_OPCODES and not serial else set()
    if following is None or (_ends_block(last) and not conditional):
        return jumps
    return jumps | {following.address}


def _natural_loops(blocks: Mapping[int, _Block], entries: set[int]) -> dict[int, frozenset[int]]:
    """Maps the address of each loop head to its basic blocks.  All back edges to the same head form one loop."""
    edges = [(head, successor) for head, block in blocks.items() for successor in block.successors & blocks.keys()]
    graph = nx.DiGraph([*edges, *((_START, entry) for entry in entries & blocks.keys())])
    graph = graph.subgraph({_START, *nx.descendants(graph, _START)})
    dominators = nx.immediate_dominators(graph, _START)
    loops: dict[int, set[int]] = {}
    for tail, head in graph.edges:
        dominator = tail
        while dominator not in (head, _START):
            dominator = dominators[dominator]
        if dominator == head:
            loop_blocks = nx.ancestors(graph.subgraph(graph.nodes - {head}), tail) if tail != head else set()
            loops.setdefault(head, {head}).update({tail, *loop_blocks})
    return {head: frozenset(body) for head, body in loops.items()}


def _only_waits(instructions: Sequence[SassInstruction]) -> bool:
    if len(instructions) > _LONGEST_WAIT or any(instruction.family in _WORK for instruction in instructions):
        return False
    loads = [instruction for instruction in instructions if instruction.family == "global_load"]
    polls = loads and all("STRONG" in load.opcode for load in loads)
    return bool(polls) or (not loads and any(instruction.name in _WAITS for instruction in instructions))

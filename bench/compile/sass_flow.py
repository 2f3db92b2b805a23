"""Analyses the control flow of SASS code: basic blocks, natural loops, and the loop that takes the most time.

A back edge goes from a basic block to one of its dominators, the loop head.  The loop has all blocks that reach the
back edge without passing the head (Aho, Lam, Sethi, Ullman, "Compilers", 2nd edition, 9.6).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from rooflab.bench.compile.sass import TENSOR_CORES, SassFunction, SassInstruction, count_families

_START_NODE = -1
"""An additional node of the flow graph, before all entries of a function."""
_END_OPCODES = ("EXIT", "RET", "KILL")
_BRANCH_OPCODES = ("BRA", "JMP", "BRX", "BRXU", "JMX", "JMXU")
_INDIRECT_OPCODES = ("BRX", "BRXU", "JMX", "JMXU")
_WAIT_OPCODES = ("SYNCS", "USETMAXREG", "NANOSLEEP", "CCTL", "UCGABAR_WAIT")
_WORK_FAMILIES = ("wgmma", "mma", "tma", "cp_async", "ldmatrix", "global_store", "shared_store", "atomic")
_MAX_WAIT_SIZE = 24
"""A loop with more instructions is no waiting loop.  On sm_90a a polling loop has four to nine instructions."""
_TARGET_OPERAND = re.compile(r"`\(([^)]+)\)|(\.L[\w.$@]+|\b0x[0-9a-f]+\b)")
_CONDITION_OPERAND = re.compile(r"^!?U?P\d\b")


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
    blocks, entry_addresses = _blocks(function)
    loop_bodies = _natural_loops(blocks, entry_addresses)
    code = {
        head: tuple(instruction for block_address in sorted(body) for instruction in blocks[block_address].instructions)
        for head, body in loop_bodies.items()
    }
    waits = {head: _only_waits(instructions) for head, instructions in code.items()}
    loops = []
    for head, body in sorted(loop_bodies.items()):
        outer_heads = [
            other_head for other_head, outer_body in loop_bodies.items() if other_head != head and body < outer_body
        ]
        nested_heads = [
            other_head
            for other_head, inner_body in loop_bodies.items()
            if other_head != head and inner_body < body and not waits[other_head]
        ]
        loops.append(Loop(head, len(outer_heads) + 1, not nested_heads and not waits[head], waits[head], code[head]))
    return loops


def hot_loop(loops: Sequence[Loop]) -> Loop | None:
    """Returns the innermost loop with the most tensor-core instructions; None if there is no loop.  If several loops
    have the most, the number of global loads decides, and then the number of all instructions."""
    innermost_loops = [loop for loop in loops if loop.innermost]
    return max(
        innermost_loops,
        key=lambda loop: (loop.tensor_core_instructions, loop.global_loads, len(loop.instructions)),
        default=None,
    )


def feeding_loop(loops: Sequence[Loop], hot: Loop | None) -> Loop | None:
    """Returns the loop that loads the data for `hot`, the loop with the most tensor-core work.  In warp-specialised
    code, other warps run this loop.  Returns None if `hot` has asynchronous copies, or if no innermost loop has any."""
    if hot is None or hot.counts["tma"] or hot.counts["cp_async"]:
        return None
    other_loops = [loop for loop in loops if loop.innermost and loop is not hot]
    load_loops = [loop for loop in other_loops if loop.counts["tma"] or loop.counts["cp_async"]]
    return max(load_loops, key=lambda loop: loop.counts["tma"] + loop.counts["cp_async"], default=None)


@dataclass
class _Block:
    instructions: list[SassInstruction]
    successors: set[int]


def _blocks(function: SassFunction) -> tuple[dict[int, _Block], set[int]]:
    """Maps the address of the first instruction of each basic block to the block.  Also returns the entry addresses of
    the kernel and of each function that it calls."""
    code = function.instructions
    targets_by_branch = {i.address: _targets(i, function) for i in code if i.name in (*_BRANCH_OPCODES, "CALL")}
    branch_targets = {target for addresses in targets_by_branch.values() for target in addresses}
    # No instruction shows the targets of an indirect branch, so every label that nothing refers to counts as one.
    indirect_targets = {a for label, a in function.labels.items() if label.startswith(".L") and a not in branch_targets}
    block_starts = {code[0].address, *function.labels.values(), *branch_targets}
    flow_blocks: dict[int, _Block] = {}
    for instruction, next_instruction in zip(code, (*code[1:], None), strict=True):
        if instruction.address in block_starts:
            current_block = flow_blocks[instruction.address] = _Block([], set())
        current_block.instructions.append(instruction)
        if instruction.name in _INDIRECT_OPCODES and not targets_by_branch[instruction.address]:
            current_block.successors = set(indirect_targets)
        elif _ends_block(instruction) or (next_instruction is not None and next_instruction.address in block_starts):
            current_block.successors = _successors(instruction, next_instruction, targets_by_branch)
        else:
            continue
        if next_instruction is not None:
            block_starts.add(next_instruction.address)
    entry_addresses = {code[0].address, *(t for i in code if i.name == "CALL" for t in targets_by_branch[i.address])}
    return flow_blocks, entry_addresses


def _ends_block(instruction: SassInstruction) -> bool:
    return instruction.name in (*_END_OPCODES, *_BRANCH_OPCODES)


def _targets(instruction: SassInstruction, function: SassFunction) -> list[int]:
    operands, target_addresses = instruction.operands, []
    if instruction.name in _INDIRECT_OPCODES:
        operands = operands.partition("BRANCH_TARGETS")[2]
    for target in map("".join, _TARGET_OPERAND.findall(operands)):
        if target in function.labels:
            target_addresses.append(function.labels[target])
        elif target.startswith("0x"):
            target_addresses.append(int(target, 16))
    return target_addresses


def _successors(last: SassInstruction, following: SassInstruction | None, targets: Mapping[int, list[int]]) -> set[int]:
    # `BRA.DIV` branches only where threads have diverged; `BRA P0, L` and `BRA.U !UP0, L` branch on an operand.
    is_conditional = bool(last.guard) or ".DIV" in last.opcode or _CONDITION_OPERAND.match(last.operands)
    # `BRA.U.ANY` repeats an instruction that takes one address for every lane that has an address: not a loop of the
    # source.
    is_serialized = last.opcode.endswith(".U.ANY")
    jump_targets = set(targets[last.address]) if last.name in _BRANCH_OPCODES and not is_serialized else set()
    if following is None or (_ends_block(last) and not is_conditional):
        return jump_targets
    return jump_targets | {following.address}


def _natural_loops(blocks: Mapping[int, _Block], entries: set[int]) -> dict[int, frozenset[int]]:
    """Finds the loops of the control-flow graph.  Maps the address of each loop head to the addresses of the loop's
    basic blocks.  All back edges to the same head form one loop."""
    flow_edges = [(head, successor) for head, node in blocks.items() for successor in node.successors & blocks.keys()]
    flow_graph = nx.DiGraph([*flow_edges, *((_START_NODE, entry_address) for entry_address in entries & blocks.keys())])
    flow_graph = flow_graph.subgraph({_START_NODE, *nx.descendants(flow_graph, _START_NODE)})
    dominators = nx.immediate_dominators(flow_graph, _START_NODE)
    loops: dict[int, set[int]] = {}
    for tail, head in flow_graph.edges:
        dominator = tail
        while dominator not in (head, _START_NODE):
            dominator = dominators[dominator]
        if dominator == head:
            loop_blocks = nx.ancestors(flow_graph.subgraph(flow_graph.nodes - {head}), tail) if tail != head else set()
            loops.setdefault(head, {head}).update({tail, *loop_blocks})
    return {head: frozenset(loop_body) for head, loop_body in loops.items()}


def _only_waits(instructions: Sequence[SassInstruction]) -> bool:
    if len(instructions) > _MAX_WAIT_SIZE or any(instruction.family in _WORK_FAMILIES for instruction in instructions):
        return False
    load_ops = [instruction for instruction in instructions if instruction.family == "global_load"]
    is_polling = load_ops and all("STRONG" in load_op.opcode for load_op in load_ops)
    return bool(is_polling) or (not load_ops and any(instruction.name in _WAIT_OPCODES for instruction in instructions))

"""A kernel made runnable: its blocks' functions, generated when they are first reached."""

from __future__ import annotations

from functools import cached_property, lru_cache

from rooflab.bench.ptx import emit
from rooflab.bench.ptx.generate import BlockFunction, Generator
from rooflab.bench.ptx.text.access_widths import granule, orders_ctas, strong
from rooflab.bench.ptx.text.flow import Block, Flow, lanes_together
from rooflab.bench.ptx.text.parse import parse
from rooflab.bench.ptx.text.syntax import Instruction, Kernel, Module, PtxError
from rooflab.bench.ptx.text.wgmma_in_flight import rewritten
from rooflab.bench.ptx.text.wgmma_registers import unfenced

SEQUENTIAL = ("wgmma", "mbarrier", "cp.async.bulk", "cp.reduce.async.bulk", "tensormap", "barrier.cluster", "mapa",
    "setmaxnreg", "bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red")  # fmt: skip
"""Instructions that make a CTA run by itself, and not in one vector with others."""


class Program:
    """One kernel of one PTX text."""

    def __init__(self, module: Module, kernel: Kernel):
        self.module, self.kernel = module, kernel
        self.flow = Flow(kernel)
        self.size = self.flow.size
        self._generator = Generator(self.flow, emit.helpers())
        self._functions: dict[tuple[int, int], BlockFunction] = {}
        self._blocks: dict[tuple[int, int], Block] = {}
        self.together = [lanes_together(instruction) for instruction in kernel.instructions]
        """By instruction, how many lanes execute it in one piece."""

    def function(self, place: int, grain: int) -> BlockFunction:
        """The function of the block at `place`."""
        key = (place, grain)
        if key not in self._functions:
            self._functions[key] = self._generator.function(self.block(place, grain))
        return self._functions[key]

    def block(self, place: int, grain: int) -> Block:
        """The block at `place`."""
        key = (place, grain)
        if key not in self._blocks:
            self._blocks[key] = self.flow.block(place, grain)
        return self._blocks[key]

    @cached_property
    def strong(self) -> dict[int, str]:
        """Loads and stores that are more than plain ones, by number."""
        return strong(self.kernel)

    @cached_property
    def orders_ctas(self) -> bool:
        """Whether its CTAs may wait for one another."""
        return orders_ctas(self.kernel)

    @cached_property
    def granules(self) -> dict[str, int]:
        """Bytes of the narrowest access to shared and to global memory."""
        return {space: granule(self.kernel, space) for space in ("shared", "global")}

    @cached_property
    def unfenced(self) -> list[tuple[Instruction, Instruction | None]]:
        """wgmmas that lack a fence, each with what touches a register of its before it; None is the beginning."""
        return unfenced(self.flow)

    @cached_property
    def rewritten(self) -> list[tuple[Instruction, Instruction]]:
        """Writes of registers that a wgmma may still have to read, each with that wgmma."""
        return rewritten(self.flow)

    @cached_property
    def sequential(self) -> bool:
        """Whether a CTA (or a cluster) must run by itself."""
        return any(instruction.opcode.startswith(SEQUENTIAL) for instruction in self.kernel.instructions)

    def source(self) -> str:
        """The generated Python of whole warpgroups: for reading."""
        blocks = (self.block(start, 128) for start in sorted(self.flow.starts(128)))
        return "\n\n".join(self._generator.source(block) for block in blocks)

    def check(self) -> None:
        """Generates everything, so that an instruction that is not known is found before a launch."""
        for start in sorted(self.flow.starts(128)):
            self.function(start, 128)


@lru_cache(maxsize=64)
def load(text: str, name: str | None = None) -> Program:
    """The kernel `name` of a PTX text; the only one without a name.  Raises `PtxError`."""
    module = parse(text)
    if name is None and len(module.entries) != 1:
        raise PtxError(f"kernel: expected a name, as the PTX has {', '.join(module.entries) or 'no kernel'}")
    return Program(module, module.kernel(next(iter(module.entries)) if name is None else name))

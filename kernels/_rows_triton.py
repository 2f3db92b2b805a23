"""Defines the configs of the Triton kernel `fused` of norms and of softmax, whose programs hold complete rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

MAX_HIDDEN_SIZE = 16384
"""The widest row: 512 threads then hold 32 fp32 values each.  With 64 values each, ptxas spills."""
ADDRESS_REGISTERS = 16
"""Registers per thread for pointers, masks and the scale, besides the rows."""
TILE_SIZE = 2048
"""The most values in a program that has several rows."""


@dataclass(frozen=True)
class Config:
    """A config of the kernel: the rows per program, and the number of warps."""

    block_t: int
    """The number of rows per program."""
    num_warps: int


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Returns the configs to try: 1 to 32 warps.  For short rows, also several rows per program."""
    padded_size = int(next_power_of_2(int(case["H"])))
    block_rows = [block_t for block_t in (1, 2, 4, 8, 16, 32) if block_t == 1 or block_t * padded_size <= 2 * TILE_SIZE]
    return tuple(Config(*config_values) for config_values in itertools.product(block_rows, (1, 2, 4, 8, 16, 32)))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of a CTA.  The registers are for the rows in fp32; the norm's weight is not counted."""
    thread_count = 32 * config.num_warps
    tile_values = config.block_t * int(next_power_of_2(int(case["H"])))
    thread_registers = cdiv(tile_values, thread_count) + ADDRESS_REGISTERS
    return Footprint(thread_count, thread_registers, 0, cdiv(int(case["T"]), config.block_t))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """Returns the default config, with 1 to 16 warps.  A thread has eight elements (16 bytes in bf16).  With more rows
    than an H100 has SMs, a thread has 16 elements, and a program has several short rows."""
    padded_size, has_many_rows = int(next_power_of_2(int(case["H"]))), int(case["T"]) > HOPPER_SMS
    block_t = max(1, TILE_SIZE // padded_size) if has_many_rows else 1
    thread_elements = 16 if has_many_rows else 8
    return Config(block_t, min(max(block_t * padded_size // (thread_elements * 32), 1), 16))


TUNING = Tuning(Config, configs, heuristic, footprint)
LIMITS = {"H": MAX_HIDDEN_SIZE}
"""The limit of H: the widest row that registers hold."""

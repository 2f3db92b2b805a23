"""The configs of the `fused` rungs of norms and softmax: a Triton program holds whole rows in registers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

# 32 fp32 values per thread of 512; with twice as many ptxas spills in fp32.
MAX_HIDDEN = 16384
ADDRESS_REGISTERS = 16
"""For pointers, masks and the scale, in addition to the rows."""
SHORT = 2048
"""Values of a program that has several rows."""


@dataclass(frozen=True)
class Config:
    """One way to launch the kernel."""

    block_t: int
    """Rows per program."""
    num_warps: int


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Every number of warps that a CTA can have, and several rows per program where they are short."""
    row = int(next_power_of_2(int(case["H"])))
    blocks = [block_t for block_t in (1, 2, 4, 8, 16, 32) if block_t == 1 or block_t * row <= 2 * SHORT]
    return tuple(Config(*values) for values in itertools.product(blocks, (1, 2, 4, 8, 16, 32)))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """The rows in fp32 registers."""
    threads = 32 * config.num_warps
    values = config.block_t * int(next_power_of_2(int(case["H"])))
    registers = cdiv(values, threads) + ADDRESS_REGISTERS
    return Footprint(threads, registers, 0, cdiv(int(case["T"]), config.block_t))


DEFAULTS = Defaults(
    (
        # No more rows than SMs: eight elements per thread (one 16-byte load in bf16).
        ({"T": HOPPER_SMS, "H": 256}, Config(1, 1)),
        ({"T": HOPPER_SMS, "H": 512}, Config(1, 2)),
        ({"T": HOPPER_SMS, "H": 1024}, Config(1, 4)),
        ({"T": HOPPER_SMS, "H": 2048}, Config(1, 8)),
        ({"T": HOPPER_SMS}, Config(1, 16)),
        # More: twice as many elements per thread, and short rows share a program.
        *(({"H": 2**n}, Config(SHORT >> n, 4)) for n in range(SHORT.bit_length())),
        ({"H": 4096}, Config(1, 8)),
        ({}, Config(1, 16)),
    )
)
TUNING = Tuning(Config, configs, DEFAULTS, footprint)
LIMITS = {"H": MAX_HIDDEN}
"""A row lies in registers."""

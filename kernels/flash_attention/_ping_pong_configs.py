"""The configs of ping_pong, and what its warpgroups hold: consumers with queries and sums, and a producer warp."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme

WARPGROUP = 128
"""Threads of a consumer, and of the producer warp's warpgroup, as setmaxnreg moves registers between warpgroups."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = 24
"""Registers per thread after setmaxnreg, a consumer's by their number."""
STEP_CLOCKS = {2: 1700, 3: 1990}
"""A step of all consumers together, for 128 keys and a head_dim of 64, by the model of docs/notes."""
ADDRESS_REGISTERS = 24
"""For peak, sum, descriptors and loop counters, in addition to accumulator, scores and weights."""
OPERAND_BYTES = 2
"""Bytes of a value in the dtypes that the kernel takes."""
ROWS = 64
"""Rows of queries per consumer."""
BARRIERS = 3
"""Barriers of the queries and the turns per consumer; each stage has four more."""


@dataclass(frozen=True)
class PingPongConfig(LaunchConfig):
    """Keys per block, slots of each ring, and consumers."""

    block_n: int
    stages: int
    consumers: int
    lazy: bool = False
    """Whether earlier sums are rescaled only when a row's peak has grown by more than 8 in log2."""

    @property
    def block_m(self) -> int:
        """Rows of queries per CTA."""
        return ROWS * self.consumers


def width_of(head_dim: int) -> int:
    """Columns of a tile: TMA fills those past head_dim with zeros, and does not store them."""
    return max(64, int(next_power_of_2(head_dim)))


def stages_in_queries(head_dim: int) -> bool:
    """Whether the result is staged in the memory of the queries, because the rings need the rest."""
    return width_of(head_dim) > 128


def configs(case: Case, scheme: Scheme = BF16) -> tuple[PingPongConfig, ...]:
    """Blocks whose scores a consumer can hold, with rings of several depths."""
    consumers = (2, 3) if width_of(int(case["D"])) == 64 else (2,)
    return tuple(
        itertools.starmap(PingPongConfig, itertools.product((64, 128), (2, 3, 4, 5), consumers, (False, True)))
    )


def _consumer_registers(config: PingPongConfig, head_dim: int) -> int:
    """fp32 accumulator and scores and 16-bit weights, for 64 rows on 128 threads."""
    return width_of(head_dim) // 2 + config.block_n // 2 + config.block_n // 4 + ADDRESS_REGISTERS


def footprint(config: PingPongConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Average registers of the CTA's threads; queries, both rings, barriers, and the staged result.

    Causal programs differ in their work, so `tensor_flops` is 0.
    """
    B, T, H, D = (int(case[key]) for key in ("B", "T", "H", "D"))
    number = config.consumers
    rows = config.block_m * (1 if stages_in_queries(D) else 2) + 2 * config.stages * config.block_n
    registers = (number * _consumer_registers(config, D) + PRODUCER_REGISTERS) // (number + 1)
    return Footprint(
        threads=(number + 1) * WARPGROUP,
        registers=registers,
        shared_bytes=rows * width_of(D) * OPERAND_BYTES + (BARRIERS * number + 4 * config.stages) * BARRIER_BYTES,
        ctas=min(cdiv(T, config.block_m) * B * H, HOPPER_SMS),
    )


def is_legal(config: PingPongConfig, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, and each of its consumers."""
    held = CONSUMER_REGISTERS[config.consumers]
    return footprint(config, case, scheme).fits and _consumer_registers(config, int(case["D"])) <= held


def heuristic(case: Case, scheme: Scheme = BF16) -> PingPongConfig:
    """The widest block that consumers and two slots can hold, more slots if they are small; for a head_dim of 64 the
    number of consumers whose rounds of tiles take fewer clocks."""
    B, T, H = (int(case[key]) for key in ("B", "T", "H"))
    width = width_of(int(case["D"]))
    if width > 64:
        return PingPongConfig(128 if width == 128 else 64, 2, 2)
    rounds = {number: cdiv(cdiv(T, ROWS * number) * B * H, HOPPER_SMS) for number in STEP_CLOCKS}
    return PingPongConfig(128, 4, min(STEP_CLOCKS, key=lambda number: rounds[number] * STEP_CLOCKS[number]))


PING_PONG = Tuning(PingPongConfig, configs, heuristic, footprint, is_legal=is_legal)

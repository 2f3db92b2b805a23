"""The configs of flash_attention's rungs that load by TMA: those worth a try, what a CTA needs, and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rooflab.kernels import _attention_configs as tiles
from rooflab.kernels._attention_configs import Config, padded
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.lib import attention_gluon as gluon
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Case, Scheme

OPERAND_BYTES = 2
TILES = space(Config, block_m=(64, 128), block_n=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4))
ROWS_OF_DEFAULTS: tuple[tuple[Mapping[str, int], Config], ...] = (
    # Two CTAs of a narrow head fit on an SM together, and their products and exponentials overlap.
    ({"D": 64}, Config(128, 64, 8, 3)),
    ({"D": 128}, Config(128, 128, 8, 2)),
    ({}, Config(128, 64, 8, 2)),
)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """128 rows have four warps only for a head_dim up to 64: wider ones spill (read in the compiled kernels)."""
    narrow = padded(int(case["D"])) <= 64
    return tuple(config for config in TILES(case) if narrow or (config.block_m, config.num_warps) != (128, 4))


def query_tiles(config: Config, case: Case) -> int:
    """Tiles of queries of all heads."""
    return cdiv(int(case["T"]), config.block_m) * int(case["H"]) * int(case["B"])


def footprint(ctas: Callable[[Config, Case], int] = query_tiles) -> Callable[..., Footprint]:
    """A CTA has its queries and every stage of keys and values in shared memory; `ctas` counts the grid."""

    def needs(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        D = padded(int(case["D"]))
        return Footprint(
            threads=32 * config.num_warps,
            registers=tiles.registers(config, D, weights=True),
            shared_bytes=(config.block_m + 2 * config.num_stages * config.block_n) * D * OPERAND_BYTES,
            ctas=ctas(config, case),
        )

    return needs


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
        return 64 * self.consumers


def ping_pong_configs(case: Case, scheme: Scheme = BF16) -> tuple[PingPongConfig, ...]:
    """Two consumers, for a narrow head also three."""
    consumers = (2, 3) if gluon.tile_columns(int(case["D"])) == 64 else (2,)
    return space(PingPongConfig, block_n=(64, 128), stages=(2, 3, 4, 5), consumers=consumers, lazy=(False, True))(case)


def ping_pong_footprint(config: PingPongConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Queries, rings, and the staged result, which with a wide head lies in the queries' memory."""
    B, T, H, D = (int(case[key]) for key in ("B", "T", "H", "D"))
    return gluon.footprint(
        config.consumers, D, config.block_n, config.stages, rows=config.block_m * (1 if D > 128 else 2),
        barriers=3 * config.consumers + 4 * config.stages, ctas=min(cdiv(T, config.block_m) * B * H, HOPPER_SMS),
    )  # fmt: skip


# The widest block that consumers and two slots can hold, more slots if they are small; a guess, unmeasured.
PING_PONG = Tuning(
    PingPongConfig,
    ping_pong_configs,
    Defaults(
        (
            ({"D": 64, "tiles": HOPPER_SMS}, PingPongConfig(128, 4, 2)),  # three consumers would have fewer CTAs
            ({"D": 64}, PingPongConfig(128, 4, 3)),
            ({"D": 128}, PingPongConfig(128, 2, 2)),
            ({"D": 256}, PingPongConfig(64, 2, 2)),
        ),
        lambda case, scheme: {"tiles": cdiv(int(case["T"]), 128) * int(case["B"]) * int(case["H"])},
    ),
    ping_pong_footprint,
)

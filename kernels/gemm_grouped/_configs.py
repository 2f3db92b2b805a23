"""Defines the configs of gemm_grouped's Triton kernels, the maximum number of tiles, and the resources of a CTA.

The host does not know the number of rows of each expert.  So it counts row panels (rows of tiles) for the worst case:
`T // BLOCK_M + E` panels for T rows and E experts.  Expert `e` has the panels from `offsets[e] // BLOCK_M + e` on.
Some panels stay empty.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import Config, space, tensor_cores, tile_footprint
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme


def panels(T: int, E: int, block_m: int) -> int:
    """Returns the maximum number of row panels (`block_m` rows each) for `T` rows and `E` experts."""
    return T // block_m + E


def tile_count(config: Any, case: Case) -> int:
    """Returns the maximum number of tiles that the result may need."""
    return panels(int(case["T"]), int(case["E"]), config.block_m) * cdiv(int(case["N"]), config.block_n)


def by_pointers(config: Config, case: Case, scheme: Scheme = BF16, barriers: int = 0) -> Footprint:
    """Returns the resources of a CTA, as in the op gemm.  The grid has a CTA for each tile that may be needed."""
    return tile_footprint(config, config.block_n, tile_count(config, case), case, scheme, barriers=barriers)


def sizes(case: Case, scheme: Scheme) -> dict[str, int]:
    """Returns the values that select default configs.  `rows` is the mean number of rows per expert.  `outputs` is the
    number of result elements.  `columns` is the sum of all experts' columns.  `tensor_cores` is 0 for FMAs, else 1."""
    T, E, N = int(case["T"]), int(case["E"]), int(case["N"])
    return {"rows": cdiv(T, max(1, E)), "outputs": T * N, "columns": E * N, **tensor_cores(case, scheme)}


# Every table is unmeasured.  Exact fp32 has no tensor core: FMAs hold both tiles in registers; larger tiles spill.
_FP32_DEFAULT_ROW = {"tensor_cores": 0}, Config(32, 64, 16, 4, 2)
_LAUNCH_OPTIONS: dict[str, Any] = {"num_warps": (4, 8), "group_m": (1, 8, 16)}
GROUPED = Tuning(
    Config,
    space(
        Config,
        ((16, 32, 64, 128), (32, 64, 128, 256), (32, 64, 128, 256)),
        ((16, 32, 64), (32, 64, 128), (16, 32)),
        num_stages=(2, 3, 4, 5),
        **_LAUNCH_OPTIONS,
    ),
    Defaults(
        (
            _FP32_DEFAULT_ROW,
            # Few rows fit a tile of mma.sync; then only the bytes in flight matter.
            ({"rows": 12}, Config(16, 64, 128, 4, 5)),
            ({"rows": 32}, Config(32, 64, 128, 4, 5)),
            ({"N": 1024}, Config(64, 128, 64, 4, 4)),
            ({"N": 2048}, Config(128, 256, 64, 8, 4)),
            ({"N": 3072}, Config(128, 128, 64, 8, 3)),
            ({}, Config(128, 256, 64, 8, 4)),
        ),
        sizes,
    ),
    by_pointers,
)
TMA = Tuning(
    Config,
    space(
        Config, ((64, 128), (32, 64, 128, 256), (64, 128, 256)), ((32, 64), (32, 64, 128), (64, 128)), in_bytes=True,
        num_stages=(2, 3, 4, 6, 8), **_LAUNCH_OPTIONS,
    ),
    Defaults((
        _FP32_DEFAULT_ROW,
        ({"outputs": 4096}, Config(64, 32, 64, 4, 8)), ({"N": 136}, Config(64, 32, 64, 4, 8)),
        ({"outputs": 8192}, Config(64, 64, 64, 4, 6)), ({"E": 8, "rows": 4}, Config(64, 256, 64, 4, 2)),
        ({"T": 8}, Config(64, 128, 64, 4, 4)), ({"rows": 4}, Config(64, 256, 64, 4, 2)),
        ({"outputs": 65536}, Config(64, 32, 64, 4, 8)), ({"N": 2048, "rows": 128}, Config(128, 256, 64, 8, 4)),
        ({"outputs": 294912}, Config(64, 64, 64, 4, 6)), ({"T": 128}, Config(64, 256, 64, 4, 2)),
        ({"K": 576}, Config(128, 128, 64, 8, 3)), ({"K": 1024}, Config(128, 256, 64, 8, 4)),
        ({"T": 512}, Config(64, 128, 64, 4, 4)), ({}, Config(128, 256, 64, 8, 4)),
    ), sizes), partial(by_pointers, barriers=1),
)  # fmt: skip

"""What `gemm/multicast` and `gemm_fp8/multicast` share on the host: the source, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from rooflab.kernels import _cuda
from rooflab.kernels._device import sm_count
from rooflab.kernels._hopper_device import BARRIERS, products
from rooflab.kernels._multicast_configs import ClusterTile
from rooflab.kernels._tensor_map import CudaMap

SOURCE = Path(__file__).with_suffix(".cu").read_text()
TYPES = {"bf16": "bf16.bf16", "fp16": "f16.f16", "fp8": "e4m3.e4m3"}
"""Of a and b in the opcode, by kind of operands."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""Per thread, by number of consumers; the producer's warpgroup has 24."""


@cache
def source(kind: str, block_n: int, transposed: tuple[bool, bool]) -> str:
    """The source for operands of `kind`, tiles of `block_n` columns, and operands contiguous along K or not."""
    fp8 = kind == "fp8"
    return BARRIERS + products(block_n, TYPES[kind], 32 if fp8 else 16, None if fp8 else transposed) + SOURCE


@cache
def _kernel(
    kind: str, config: ClusterTile, along_k: tuple[bool, bool], bias: bool, residual: bool, block_scales: bool
) -> _cuda.CudaKernel:
    macros = {
        "FP8": kind == "fp8",
        "HALF": kind == "fp16",
        "CONSUMERS": config.consumers,
        "REGISTERS": CONSUMER_REGISTERS[config.consumers],
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "GROUP_M": max(1, config.group_m // config.cluster),
        "STAGED": config.staged,
        "CLUSTER": config.cluster,
        "A_ALONG_K": along_k[0],
        "B_ALONG_K": along_k[1],
        "BIAS": bias,
        "RESIDUAL": residual,
        "BLOCK_SCALES": block_scales,
    }
    text = source(kind, config.block_n, (not along_k[0], not along_k[1]))
    return _cuda.load(text, "multicast", options=tuple(f"-D{name}={int(value)}" for name, value in macros.items()))


def launch(
    kind: str,
    config: ClusterTile,
    maps: Sequence[CudaMap],
    sizes: tuple[int, int, int],
    *,
    along_k: tuple[bool, bool] = (True, True),
    bias: torch.Tensor | None = None,
    residual: bool = False,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    block_scales: bool = False,
) -> None:
    """Launches on the maps of a, b, the output and the residual (or the output again); `sizes` are M, N and K.

    kind: `bf16`, `fp16` or `fp8`; along_k: whether a and b are contiguous along K; scales: those of fp8's a and b.
    """
    M, N, _ = sizes
    kernel = _kernel(kind, config, along_k, bias is not None, residual, block_scales)
    clusters = min(config.clusters(M, N), max(1, sm_count(maps[0].base.device) // config.cluster))
    strides = [stride for scale in scales for stride in scale.stride()] if scales and block_scales else [0] * 4
    kernel(
        (clusters * config.cluster,), (128 * (config.consumers + 1),), *maps, bias, *(scales or (None, None)),
        *map(np.int32, sizes), *map(np.int64, strides), shared_bytes=config.shared_bytes,
    )  # fmt: skip

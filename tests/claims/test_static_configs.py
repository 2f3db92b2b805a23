"""Legal configs of every tunable kernel compile for Hopper, and spill no more than is said here.

All of a kernel's configs, or a sample of them where they are many.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from rooflab.bench.compile.cases import KernelCase, Query
from rooflab.bench.compile.static import CompileFailure, compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.kernels.registry import Kernel, kernels, ops
from rooflab.reference.spec import SCHEMES

FMA = "fp32 products are FMAs, whose operands are held in registers, more than is_legal counts"
FEW = "two to four registers"
MOST_STACK_BYTES = {
    "flash_attention/masked_tiles fp32": (232, FMA),
    "flash_attention/masked_tiles bf16": (8, FEW),
    "flash_attention/online fp32": (16, FEW),
    "flash_attention/ping_pong bf16": (16, FEW),
    "flash_attention_varlen/online fp32": (224, FMA),
    "flash_attention_varlen/online bf16": (16, FEW),
    "gemm/gemv fp32": (16, FEW),
    "gemm/pipelined fp32": (8, FEW),
    "gemm/pipelined bf16": (8, FEW),
    "gemm/stream_k fp32": (8, FEW),
    "gemm/tensor_core bf16": (16, FEW),
    "gemm_grouped/grouped fp32": (16, FEW),
    "gemm_grouped/tma fp32": (5848, FMA),
    "gemm_silu_and_mul/fused fp32": (16, FEW),
    "gemm_silu_and_mul/fused bf16": (8, FEW),
    "gemm_silu_and_mul/persistent fp32": (1752, FMA),
    "gemm_silu_and_mul/tma fp32": (1696, FMA),
    "gemm_w4a16/gemv w4a16_g128": (176, "up to 8 loads of weights on their way in registers"),
    "gemm_w8a16/dequant_dot w8a16": (864, "128 by 128 outputs on four warps, and a tile of weights being converted"),
    "mla_decode/split_kv bf16": (440, "32 heads by 512 values on four warps: 128 registers, beside scores"),
    "paged_attention/chunked fp32": (280, FMA),
    "paged_attention/chunked bf16": (192, "a pointer for each 16 bytes of 128 keys, on four warps"),
    "paged_attention/chunked kv_fp8": (40, "the same"),
    "paged_attention/gqa_packed fp32": (336, FMA),
    "paged_attention/gqa_packed bf16": (160, "one warp holds a whole tile"),
    "paged_attention/split_kv kv_fp8": (112, "held to the registers that 16 warps leave, beside the conversion"),
    "paged_attention/tma_pages bf16": (56, "said in test_compile.py"),
}
"""Bytes of stack a thread of the worst config, by kernel and dtype, and what, by its tile, fills its registers.  It is
legal all the same: a config that spills may still be the fastest, and tuning measures it."""
LIKE_OTHERS = ("fp16", "tf32", "w4a16_g32", "w4a16_g64")
"""Dtypes left out for the time: fp16 and TF32 take what bf16 takes by other names, the others other groups."""
ORDER_ONLY = ("group_m",)
"""Fields that only say in which order tiles are visited: of configs that differ in nothing else, one is compiled."""
SAMPLE = 24
"""Of a kernel in one dtype: thousands of configs are legal, and the largest take seconds each."""


def label(config: Any) -> str:
    """`block_m=64,num_warps=4`."""
    return ",".join(f"{key}={value}" for key, value in dataclasses.asdict(config).items() if key not in ORDER_ONLY)


def sampled(kernel: Kernel, scheme: str) -> list[KernelCase]:
    """Of a kernel's legal configs at the most work of llama3_8b; none in a dtype that it does not take."""
    chosen = Query(kernel.op, (kernel.name,), ("llama3_8b",), (), (scheme,)).select()
    if not chosen:
        return []
    (item,) = chosen
    legal = sorted(kernel.tunable.legal_configs(item.case, SCHEMES[scheme]), key=dataclasses.astuple)
    configs = list({label(config): config for config in legal}.values())
    if len(configs) > SAMPLE:
        configs = random.Random(0).sample(configs, SAMPLE)
    return [item._replace(config=config) for config in configs]


TRIED = [
    pytest.param(kernel, scheme, id=f"{kernel.id} {scheme}")
    for op, spec in ops().items()
    for kernel in kernels(op).values()
    for scheme in spec.schemes
    if kernel.tuning is not None and scheme not in LIKE_OTHERS
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kernel", "scheme"), TRIED)
def test_legal_configs_compile_and_spill_no_more_than_is_known(kernel, scheme):
    known, _ = MOST_STACK_BYTES.get(f"{kernel.id} {scheme}", (0, ""))
    requests = sampled(kernel, scheme)
    if not requests:
        assert not known, "it takes no case of llama3_8b in this dtype any more"
        return
    found = {}
    for request, result in zip(requests, compile_kernels(requests, Store()), strict=True):
        assert not isinstance(result, CompileFailure), f"{request.config}: {result}"
        found[label(request.config)] = max(info.stack_bytes for info in result)
    assert max(found.values()) <= known, {config: size for config, size in found.items() if size > known}
    assert max(found.values()) == known, "the figure is no longer true"


def test_what_is_known_is_of_kernels_that_are_there():
    assert set(MOST_STACK_BYTES) <= {param.id for param in TRIED}
    assert all(size > 0 and reason for size, reason in MOST_STACK_BYTES.values())

"""Offsets past 2**31: where the rows of an operand lie far apart, every kernel gives what it gives where they do not.

Rows are spread so that the last starts at 2**31 elements or beyond; memory is only touched where they are.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from op_kernels import CPU, here

from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels.registry import Kernel, get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case

EMULATED = {"gemm": ["one_thread", "shared_tiles"]}
"""Kernels in CUDA C++ that take any strides."""
FAR = [
    ("gemm", "M=3,N=16,K=16,layout=NT,bias=false", ("a",), 0),
    ("gemm", "M=3,N=16,K=16,layout=NT,bias=false,residual=true", ("residual", "out"), 0),
    ("gemm", "M=16,N=8,K=16,layout=NT,bias=false", ("b",), 1),
    ("gemm_grouped", "T=3,top_k=1,E=1,N=16,K=16,skew=0.0", ("a",), 0),
    ("gemm_grouped", "T=6,top_k=1,E=3,N=1,K=16,skew=0.0", ("b",), 0),
    ("gemm_silu_and_mul", "M=3,I=1,K=16,layout=NT", ("a",), 0),
    ("gemm_silu_and_mul", "M=3,I=1,K=16,layout=NT", ("b",), 1),
    ("embedding", "T=4,V=3,H=16", ("weight",), 0),
    ("rmsnorm", "T=3,H=16,eps=1e-06", ("x",), 0),
    ("fused_add_rmsnorm", "T=3,H=16,eps=1e-06", ("x", "residual"), 0),
    ("silu_and_mul", "T=3,I=8", ("x",), 0),
    ("rope", "T=3,H=1,H_kv=1,D=4,max_position=9,interleaved=false", ("q", "k"), 0),
    ("kv_cache_write", "T=1,H_kv=3,D=64,num_blocks=1,block_size=1,skipped=0", ("k", "v"), 1),
    ("flash_attention", "B=1,T=1,S=3,H=1,H_kv=1,D=64,causal=false", ("k", "v"), 1),
    ("mla_decode", "B=1,context=5,H=3,latent=16,rotary=16,block_size=16,ragged=false", ("out",), 1),
    ("flash_attention_varlen", "B=1,T=3,S=3,H=1,H_kv=1,D=64,causal=false", ("q", "k", "v"), 0),
]


def spread(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy whose entries along `dim` lie apart."""
    apart = -(-(2**31) // (tensor.shape[dim] - 1) // 64) * 64
    storage = torch.empty(2**31 + 64 * tensor.shape[dim] + tensor.numel(), dtype=tensor.dtype)
    strides = [apart if at == dim else stride for at, stride in enumerate(tensor.stride())]
    if all(size == 1 for size in tensor.shape[:dim]):
        strides[:dim] = [2 * apart * tensor.shape[dim]] * dim  # of whole 16 bytes, and of no matter
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


def result(kernel: Kernel, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What a call returns, or leaves in its inputs."""
    spec = get_op(kernel.op)
    with emulating_cuda(lambda *launch: emulate(*launch)) if kernel.backend == "cuda" else nullcontext():  # type: ignore[arg-type]
        found = kernel.fn(**inputs)
    if spec.mutates:
        return tuple(inputs[name] for name in spec.outputs)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("op", "case", "names", "dim"), FAR, ids=lambda value: str(value))
def test_rows_far_apart_are_read_and_written_as_near_ones(op, case, names, dim):
    every = [*here(op, "triton"), *(get_kernel(op, name) for name in EMULATED.get(op, ()))]
    made = get_op(op).make_inputs(Case.parse(case), SCHEMES["fp16"], CPU, 0)
    near = {name: value for name, value in made.items() if value is not None}
    ran = []
    for kernel in every:
        if kernel.prepare is not None:
            continue
        given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in near.items()}
        wanted = result(kernel, given) if kernel.why_not_args(near) is None else None
        if wanted is None:
            continue
        more = {"out": torch.empty_like(wanted[0])} if "out" in names else {}
        far = {name: spread(value, dim) if name in names else value for name, value in {**near, **more}.items()}
        if kernel.why_not_args({name: value for name, value in far.items() if name != "out"}) is None:
            found = result(kernel, far)
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), kernel.id
            ran.append(kernel.name)
    assert ran


def test_trap_40_a_slot_of_a_cache_past_2_31_is_written():
    """A cache of 2**31 + 64 values, of which one slot is touched: the one that starts at 2**31."""
    for kernel in here("kv_cache_write", "triton"):
        cache = torch.empty(2**25 + 1, 1, 1, 64, dtype=torch.float16)
        k = torch.arange(64, dtype=torch.float16).view(1, 1, 64)
        cache[-1] = 0.0
        kernel(k=k, v=k, k_cache=cache, v_cache=cache, slot_mapping=torch.tensor([2**25]))
        assert torch.equal(cache[-1], k)

"""Behaviour that several ops over rows share: transformers' order of casts, Gemma's offset, outputs in eight bits,
memory that outputs may share, and large gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_kernels import CPU, assert_right, each, here

from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels.registry import Kernel, get_kernel, get_op
from rooflab.reference import rows
from rooflab.reference.rmsnorm import SPEC
from rooflab.reference.spec import SCHEMES, Case, as_tuple

NORMS = [*here("rmsnorm"), *here("fused_add_rmsnorm")]
QUANTIZED = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "gelu_and_mul")


@each(NORMS)
def test_with_options_a_norm_is_that_of_transformers_bit_for_bit(kernel: Kernel) -> None:
    """Llama's rounds before the weight, Gemma's adds one to it in fp32; without an option at most 9 in 10 agree."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    dtype = torch.float16 if kernel.backend == "triton" else torch.bfloat16  # the interpreter rounds bf16 its own way
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 512, generator=generator).to(dtype)
    weight = (1 + 0.3 * torch.randn(512, generator=generator)).to(dtype)
    more = {"residual": torch.zeros_like(x)} if kernel.op == "fused_add_rmsnorm" else {}
    for theirs, options in (
        (LlamaRMSNorm(512, eps=1e-6), {"round_first": True}),
        (GemmaRMSNorm(512, eps=1e-6), {"weight_offset": 1.0}),
    ):
        theirs.weight.data = weight
        with torch.no_grad():
            wanted = theirs(x)
        same, without = (
            (as_tuple(kernel(x=x, weight=weight, eps=1e-6, **more, **given))[0] == wanted).float().mean()
            for given in (options, {})
        )
        assert same > 0.999 and without < 0.9, (same, without)


def quantized(kernel: Kernel, inputs: dict[str, Any], out: Any = None) -> Any:
    """One call; `cluster` is compiled and emulated in this process."""
    with emulating_cuda(lambda *launch: emulate(*launch)):
        return kernel.fn(**inputs, out=out)


@pytest.mark.parametrize("op", QUANTIZED)
def test_rows_of_fp32_are_quantised_to_their_end(op: str) -> None:
    spec, scheme = get_op(op), SCHEMES["out_int8"]
    case = spec.cases["smoke"][0].but(**{"T": 2, "I" if op.endswith("mul") else "H": 16})
    inputs = spec.make_inputs(case, scheme, CPU, 0)
    inputs = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    codes, sums = torch.full((2, 16), 7, dtype=torch.int8), (torch.full((2, 16), 7.0),) * (op == "fused_add_rmsnorm")
    found = quantized(get_kernel(op, "cluster"), inputs, (codes, *sums, torch.full((2,), 7.0)))
    assert_right(spec, found, inputs, scheme)


def test_a_code_off_by_one_step_and_a_scale_of_another_row_are_rejected() -> None:
    kernel, case = get_kernel("rmsnorm", "naive"), Case(T=4, H=48, eps=1e-6)
    for name in ("out_int8", "out_fp8"):
        inputs = SPEC.make_inputs(case, SCHEMES[name], CPU, 0)
        oracle = SPEC.oracle(inputs)
        codes, scale = kernel(**inputs)
        judged = SPEC.judge((codes, scale), oracle, inputs, SCHEMES[name])
        assert all(error.passed for error in judged), [error.describe() for error in judged]
        off = codes.float()
        off[2, 5] = torch.nextafter(codes[2, 5].float(), torch.tensor(9e9)) + max(1.0, off[2, 5].abs().item() / 8)
        assert not SPEC.judge((off, scale), oracle, inputs, SCHEMES[name])[0].passed
        assert not SPEC.judge((codes, scale.roll(1)), oracle, inputs, SCHEMES[name])[1].passed


def test_half_a_step_of_e4m3_is_what_its_neighbours_say() -> None:
    """Halfway between two codes the limit is met, and a little beyond the next code it is not."""
    codes = torch.tensor([[0.0, 2.0**-9, 2.0**-6, 1.0, 1.5, 416.0]], dtype=torch.float64)
    steps = torch.tensor([[2.0**-9, 2.0**-9, 2.0**-9, 2.0**-3, 2.0**-3, 32.0]], dtype=torch.float64)
    limit, _ = rows.quantized_limits((codes, torch.ones(1).double()), torch.zeros(1, 6).double(), "fp8_e4m3")
    assert ((limit >= steps / 2) & (limit < steps / 2 * (1 + 1e-4))).all()


@pytest.mark.parametrize("op", ["rmsnorm", "softmax", "layernorm"])
def test_out_may_be_the_input_and_may_not_overlap_it(op: str) -> None:
    for kernel in here(op):
        if "out" not in kernel.accepted:
            continue
        more = {} if op == "softmax" else {"weight": torch.ones(16)}
        memory = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
        wanted = kernel(x=memory[:4].clone(), **more)
        with pytest.raises(ValueError, match="out: expected memory of its own, or x itself"):
            kernel(x=memory[:4], out=memory[1:], **more)
        kernel(x=memory[:4], out=memory[:4], **more)
        assert torch.equal(memory[:4], wanted), kernel.id


def test_two_outputs_may_lie_side_by_side_and_may_not_share_memory() -> None:
    norm, x, memory = get_kernel("fused_add_rmsnorm", "naive").fn, torch.ones(4, 16), torch.zeros(8, 16)
    norm(x, x.clone(), torch.ones(16), out=(memory[:4], memory[4:]))
    for given, outs in ((x, (memory[:4], memory[1:5])), (x[:1, :1], (memory[:1, :1],) * 2)):
        with pytest.raises(ValueError, match="out: expected memory of its own, got .* overlaps another output's"):
            norm(given, given.clone(), torch.ones(given.shape[1]), out=outs)

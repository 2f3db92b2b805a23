"""Kernels of SGLang: attention, norms, routing, quantization, state-space models, caches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from compatibility.entries import Entry, Project, interleaved, ints, rms
from compatibility.fla import recurrence
from compatibility.sources import Source

STUBS = (
    "sglang.srt.utils",
    "sglang.jit_kernel.utils",
    "sglang.multimodal_gen",
    "sglang.srt.environ",
    "sglang.kernel_api_logging",
    "sglang.srt.layers.moe.topk",
    "sglang.srt.layers.deep_gemm_wrapper",
    "sglang.srt.layers.quantization.fp8_kernel",
    "sglang.srt.layers.moe.utils",
    "sglang.srt.server_args",
    "sglang.srt.platforms",
)
SOURCE = Source("SGLang", "sglang==0.5.14", "sglang/", STUBS, needs=("einops==0.8.1",))
Tensor = torch.Tensor
_jit = SOURCE.below("sglang.jit_kernel")


def _layer(name: str) -> Any:
    module = SOURCE.module(f"sglang.srt.layers.{name}")
    for switch, value in (("_is_cuda", True), ("CUDA_CAPABILITY", (9, 0))):
        setattr(module, switch, value)
    return module


def _invariant() -> Any:
    module = SOURCE.module("sglang.srt.batch_invariant_ops.batch_invariant_ops")
    module.get_device_core_count = lambda: 132
    return module


def _attended(q: Tensor, k: Tensor, v: Tensor, past: int = 0, causal: bool = True) -> Tensor:
    """Attention of one sequence's tokens behind `past` others."""
    a, b, c = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v))
    seen = torch.ones(q.shape[0], k.shape[0]).tril(past).bool() if causal else None
    return F.scaled_dot_product_attention(a, b, c, seen).transpose(0, 1)


def each(q: Tensor, k: Tensor, v: Tensor, *sizes: int) -> Tensor:
    """Causal attention of each sequence to itself."""
    return torch.cat([_attended(*each) for each in zip(*(torch.split(x, list(sizes)) for x in (q, k, v)), strict=True)])


def _decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    splits, out = 3, torch.zeros_like(q)
    _layer("attention.triton_ops.decode_attention").decode_attention_fwd(
        q,
        k,
        v,
        out,
        ints(0, 37, 42),
        torch.arange(41, -1, -1),
        torch.zeros(2, q.shape[1], splits, 32),
        torch.zeros(2, q.shape[1], splits),
        ints(3, 1),
        splits,
        32**-0.5,
        1.0,
        1.0,
    )
    return out


def decoded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token of each of two sequences, whose keys lie backwards in the first 42 rows."""
    k, v = k[:42].flip(0), v[:42].flip(0)
    return torch.cat([_attended(q[:1], k[:37], v[:37], 36), _attended(q[1:], k[37:], v[37:], 4)])


def _extend(q: Tensor, k: Tensor, v: Tensor, c: Tensor, d: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    _layer("attention.triton_ops.extend_attention").extend_attention_fwd(
        q, k, v, out, c, d, ints(0, 19, 24), ints(0, 30, 30), torch.arange(29, -1, -1), None, True, None, 19, 1.0, 1.0
    )
    return out


def _extended(q: Tensor, k: Tensor, v: Tensor, c: Tensor, d: Tensor) -> Tensor:
    first = _attended(q[:19], torch.cat([c.flip(0), k[:19]]), torch.cat([d.flip(0), v[:19]]), 30)
    return torch.cat([first, _attended(q[19:], k[19:], v[19:])])


def _prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    _layer("attention.triton_ops.prefill_attention").context_attention_fwd(q, k, v, out, ints(0, 37), ints(37, 5), 37)
    return out


def merged(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of an attention and the logarithms of their sums."""
    both = torch.stack([x, y]).softmax(0)[..., None]
    return a * both[0] + b * both[1], torch.logaddexp(x, y)


def _routed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = 30 * torch.tanh(x @ w.T / 30)
    top = logits.softmax(-1).topk(2, -1)
    return top.values, top.indices.int()


def ssm(h: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """One step of a selective state-space model."""
    step = F.softplus(dt)[..., None]
    state = h * torch.exp(-a.exp() * step) + b[:, 0, None, None] * (x[..., None] * step)
    return (state * c[:, 0, None, None]).sum(-1) + x * d, state


def _selective(h: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(x)
    _layer("attention.mamba.ops.mamba_ssm").selective_state_update(
        h, x, dt, -a.exp(), b, c, d, dt_softplus=True, dt_bias=torch.zeros_like(d), out=out
    )
    return out, h


def _per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, True) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def unpacked_awq(q: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """Weights of AWQ's order of eight in a word."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]) * 4
    both = [((x[..., None] >> order) & 15).flatten(1) for x in (q, z)]
    return (both[0] - both[1].repeat_interleave(32, 0)) * s.repeat_interleave(32, 0)


def _gdn(a_log: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return (-a_log.exp() * F.softplus(a + bias))[None], b.sigmoid()[None]


KV = "k=60x{0}x32:bf16,v=60x{0}x32:bf16"
ENTRIES = (
    Entry("decode_attention", "q=2x4x32:bf16," + KV.format(4), _decode, decoded),
    Entry("decode_attention in groups", "q=2x4x32:bf16," + KV.format(2), _decode, decoded, allowed=2),
    Entry("extend_attention", "q=24x4x32:bf16,k=24x2x32:bf16,v=24x2x32:bf16,c=30x2x32:bf16,d=30x2x32:bf16", _extend,
          _extended, allowed=2),
    Entry("prefill_attention", "q=42x4x32:bf16,k=42x2x32:bf16,v=42x2x32:bf16", _prefill,
          lambda q, k, v: each(q, k, v, 37, 5), allowed=2),
    Entry("merge_state", "a=7x3x40,x=7x3,b=7x3x40,y=7x3",
          lambda *x: _layer("attention.triton_ops.merge_state").merge_state_triton(*x), merged),
    Entry("softcap", "x=7x96", lambda x: _layer("triton_ops.softcap").softcap_out(x, 3.0),
          lambda x: 3 * torch.tanh(x / 3)),
    Entry("fused_rmsnorm", "x=7x96:bf16,w=96:bf16", lambda x, w: _layer("elementwise").fused_rmsnorm(x, w, 1e-6), rms),
    Entry("fused_dual_residual_rmsnorm", "x=7x96,r=7x96,v=96,w=96",
          lambda x, r, v, w: _layer("elementwise").fused_dual_residual_rmsnorm(x, r, v, w, 1e-6),
          lambda x, r, v, w: (rms(rms(x, v) + r, w), rms(x, v) + r)),
    Entry("gelu_and_mul", "x=7x96", lambda x: _layer("elementwise").gelu_and_mul_triton(x)[0],
          lambda x: F.gelu(x[:, :48], approximate="none") * x[:, 48:]),
    Entry("silu_and_mul", "x=7x96", lambda x: _layer("elementwise").silu_and_mul_triton(x)[0],
          lambda x: F.silu(x[:, :48]) * x[:, 48:]),
    Entry("fused_sigmoid_mul", "x=7x96,g=7x96", lambda x, g: _layer("elementwise").fused_sigmoid_mul(x, g),
          lambda x, g: x * g.sigmoid()),
    Entry("fused_gate_sigmoid_mul_add", "x=7x96,w=96,s=7x96,o=7x96",
          lambda x, w, s, o: (_layer("elementwise").fused_gate_sigmoid_mul_add(x, w, s, o), o)[1],
          lambda x, w, s, o: o + (x @ w).sigmoid()[:, None] * s),
    Entry("router", "x=7x96,w=8x96", lambda x, w: _layer("moe.router").fused_moe_router_cudacore(x, w, 2, 30.0),
          _routed),
    Entry("router on tensor cores", "x=7x256:bf16,w=16x256:bf16",
          lambda x, w: _layer("moe.router").fused_moe_router_tensorcore(x, w, 2, 30.0, 32, 16, 128), _routed,
          allowed=64),
    Entry("selective_state_update", "h=2x3x16x20,x=2x3x16,dt=2x3x16,a=3x16x20,b=2x1x20,c=2x1x20,d=3x16", _selective,
          ssm),
    Entry("rms_norm_gated", "x=7x96,w=96,z=7x96",
          lambda x, w, z: _layer("attention.mamba.ops.layernorm_gated").rms_norm_gated(x, w, None, z, group_size=32),
          lambda x, w, z: F.rms_norm((x).unflatten(1, (3, 32)), (32,), None, 1e-6).flatten(1) * w * F.silu(z)),
    Entry("fused_recurrent_gated_delta_rule", "q=1x19x2x32,k=1x19x2x32,v=1x19x2x32,g=1x19x2,b=1x19x2",
          lambda q, k, v, g, b: _layer("attention.fla.fused_recurrent").fused_recurrent_gated_delta_rule(
              q, F.normalize(k, dim=-1), v, F.logsigmoid(g), b.sigmoid())[0],
          lambda q, k, v, g, b: recurrence(
              q, F.normalize(k, dim=-1), v, F.logsigmoid(g)[..., None, None], b.sigmoid())),
    Entry("fused_gdn_gating", "a_log=13,a=7x13,b=7x13,bias=13",
          lambda *x: _layer("attention.fla.fused_gdn_gating").fused_gdn_gating(*x), _gdn),
    Entry("l2norm", "x=7x96", lambda x: _layer("attention.fla.l2norm").l2norm(x),
          lambda x: x * (x.square().sum(-1, True) + 1e-6).rsqrt()),
    Entry("per_token_quant_int8", "x=7x96", lambda x: _layer("quantization.int8_kernel").per_token_quant_int8(x),
          _per_token),
    Entry("awq_dequantize", "q=64x6:i32<2000000000,s=2x48:fp16,z=2x6:i32<2000000000",
          lambda q, s, z: _layer("quantization.awq.awq_triton").awq_dequantize_triton(q, s, z), unpacked_awq),
    Entry("awq_gemm", "x=7x64:fp16,q=64x6:i32<2000000000,s=2x48:fp16,z=2x6:i32<2000000000",
          lambda x, q, s, z: _layer("quantization.awq.awq_triton").awq_gemm_triton(x, q, s, z, 1),
          lambda x, q, s, z: x @ unpacked_awq(q, s, z).half().double()),
    Entry("gemma_rmsnorm_residual_scalar", "x=7x96,w=96,r=7x96,s=1",
          lambda *x: _layer("gemma4_fused_ops").gemma_rmsnorm_residual_scalar(*x),
          lambda x, w, r, s: (rms(x, w) + r) * s),
    Entry("fused_qk_norm", "q=7x3x40,k=7x2x40,v=40,w=40", lambda *x: _layer("fused_qk_norm").fused_qk_norm(*x, 1e-6),
          lambda q, k, v, w: (rms(q, v), rms(k, w))),
    Entry("log_softmax", "x=7x99", lambda x: _invariant().log_softmax(x), lambda x: x.log_softmax(-1)),
    Entry("mean_dim", "x=7x19x9", lambda x: _invariant().mean_dim(x, 1), lambda x: x.mean(1)),
    Entry("matmul_persistent", "a=37x70:bf16,b=70x50:bf16", lambda a, b: _invariant().matmul_persistent(a, b),
          lambda a, b: a @ b),
    Entry("rms_norm", "x=7x96,w=96", lambda x, w: _invariant().rms_norm(x, w, 1e-6), rms),
    Entry("norm_infer", "x=7x96,w=96,b=96", lambda x, w, b: _jit("diffusion.triton.norm").norm_infer(x, w, b, 1e-6),
          lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-6)),
    Entry("fuse_scale_shift", "x=2x19x96,s=2x19x96,t=2x19x96",
          lambda x, s, t: _jit("diffusion.triton.scale_shift").fuse_scale_shift_kernel(x, s, t),
          lambda x, s, t: x * (1 + s) + t),
    Entry("rotary of diffusion", "x=19x3x32,t=19x16",
          lambda x, t: _jit("diffusion.triton.rotary").apply_rotary_embedding(x, t.cos(), t.sin(), True), interleaved),
    Entry("group_norm_silu", "x=2x6x20,w=6,b=6",
          lambda x, w, b: _jit("diffusion.triton.group_norm_silu").triton_group_norm_silu(x, w, b, 2),
          lambda x, w, b: F.silu(F.group_norm(x, 2, w, b, 1e-5))),
    Entry("sigmoid_gate_mul", "x=7x96:bf16,g=7x96:bf16",
          lambda x, g: _jit("triton.sigmoid_gate_mul").sigmoid_gate_mul(x, g), lambda x, g: x * g.sigmoid()),
)  # fmt: skip
PROJECT = Project(SOURCE, ENTRIES)

"""Kernels of vLLM: attention, batch-invariant operators, sampling, state-space models, quantization."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from compatibility.entries import Entry, Project, into, ints
from compatibility.sglang import decoded, each, merged, ssm, unpacked_awq
from compatibility.sources import Nothing, Source

STUBS = (
    "vllm.envs", "vllm.platforms", "vllm.logger", "vllm.utils", "vllm.config", "vllm.distributed", "vllm._custom_ops",
    "vllm.model_executor.warmup", "vllm.v1.kv_cache_interface", "vllm.v1.attention.backends", "vllm.sampling_params",
    "vllm.v1.worker.gpu.buffer_utils", "vllm.v1.worker.gpu.states", "vllm.v1.worker.gpu.input_batch",
    "vllm.model_executor.custom_op", "vllm.v1.outputs", "vllm.forward_context", "vllm.compilation",
)  # fmt: skip
GIVEN = {
    "vllm.platforms.current_platform": Nothing(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_cuda=lambda: True,
        is_arch_support_pdl=lambda: True,
        get_device_capability=lambda *index: SimpleNamespace(major=9, minor=0),
    ),
    "vllm.envs.VLLM_TUNED_CONFIG_FOLDER": None,
    "vllm.utils.math_utils.RCP_LN2": 1.4426950408889634,
    "vllm.utils.platform_utils.num_compute_units": lambda *index: 132,
    "vllm.utils.platform_utils.get_device_name_as_file_name": lambda: "none",
}
SOURCE = Source("vLLM", "vllm==0.33.0", "vllm/", STUBS, GIVEN)
Tensor = torch.Tensor
_attention = SOURCE.below("vllm.v1.attention.ops")
_sample = SOURCE.below("vllm.v1.worker.gpu.sample")
_layer = SOURCE.below("vllm.model_executor.layers")


def _invariant() -> Any:
    return SOURCE.module("vllm.model_executor.determinism.batch_invariant")


def _decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    where = torch.arange(41, -1, -1).int()
    table = torch.stack([where[:37], F.pad(where[37:], (0, 32))])
    out = torch.zeros_like(q)
    _attention("triton_decode_attention").decode_attention_fwd(
        q, k, v, out, torch.zeros(2, q.shape[1]), table, ints(37, 5), torch.zeros(2, q.shape[1], 3, 33), 3, 32**-0.5
    )
    return out


def _min_p(x: Tensor, p: Tensor) -> Tensor:
    p = p.sigmoid()[:, None]
    return x.masked_fill(x < x.amax(-1, True) + p.log(), -torch.inf)


def _beside(*calls: Any) -> Any:
    """What two calls return, which vLLM runs on two streams."""
    run = runpy.run_path(str(SOURCE.fetched() / "vllm/utils/multi_stream_utils.py"))["maybe_execute_in_parallel"]
    return run(*calls, torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Stream())


def _row(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.int32)


KV = "k=60x1x{0}x32:bf16,v=60x1x{0}x32:bf16"
STEP = "h=2x3x16x20,x=2x3x16,dt=2x3x16,a=3x16x20,b=2x1x20,c=2x1x20,d=3x16"
ENTRIES = (
    Entry("merge_attn_states", "a=7x3x40,x=3x7,b=7x3x40,y=3x7",
          lambda a, x, b, y: into(lambda o, s: _attention("triton_merge_attn_states").merge_attn_states(
              o, a, x, b, y, s), torch.empty_like(a), torch.empty_like(x)),
          lambda a, x, b, y: (merged(a, x.T, b, y.T)[0], torch.logaddexp(x, y))),
    Entry("prefill_attention", "q=42x4x32:bf16,k=42x2x32:bf16,v=42x2x32:bf16",
          lambda q, k, v: into(lambda o: _attention("triton_prefill_attention").context_attention_fwd(
              q, k, v, o, ints(0, 37), ints(37, 5), 37), torch.empty_like(q)),
          lambda q, k, v: each(q, k, v, 37, 5), allowed=2),
    Entry("decode_attention", "q=2x4x32:bf16," + KV.format(4), _decode,
          lambda q, k, v: decoded(q, k[:, 0], v[:, 0]), allowed=2),
    Entry("decode_attention in groups", "q=2x4x32:bf16," + KV.format(2), _decode,
          lambda q, k, v: decoded(q, k[:, 0], v[:, 0]), allowed=2),
    Entry("log_softmax", "x=7x99", lambda x: _invariant().log_softmax(x), lambda x: x.log_softmax(-1)),
    Entry("softmax", "x=7x99", lambda x: _invariant().softmax(x), lambda x: x.softmax(-1)),
    Entry("mean_dim", "x=7x19x9", lambda x: _invariant().mean_dim(x, 1), lambda x: x.mean(1)),
    Entry("matmul_persistent", "a=37x70:bf16,b=70x50:bf16", lambda a, b: _invariant().matmul_persistent(a, b),
          lambda a, b: a @ b),
    Entry("bmm", "a=3x37x70:bf16,b=3x70x50:bf16", lambda a, b: _invariant().bmm_batch_invariant(a, b),
          lambda a, b: a @ b),
    Entry("rms_norm", "x=7x96,w=96", lambda x, w: _invariant().rms_norm_batch_invariant(x, w),
          lambda x, w: F.rms_norm(x, (96,), w, 1e-6)),
    Entry("apply_temperature", "x=7x99,t=7",
          lambda x, t: (_sample("gumbel").apply_temperature(x, _row(7), t.sigmoid()), x)[1],
          lambda x, t: x / t.sigmoid()[:, None]),
    Entry("apply_min_p", "x=7x99,p=7", lambda x, p: (_sample("min_p").apply_min_p(x, _row(7), p.sigmoid()), x)[1],
          _min_p),
    Entry("token_logprobs", "x=7x99,i=7x3:i64<99", lambda x, i: _sample("logprob").compute_token_logprobs(x, i),
          lambda x, i: x.log_softmax(-1).gather(1, i)),
    Entry("selective_state_update", STEP,
          lambda h, x, dt, a, b, c, d: (*into(lambda out: _layer("mamba.ops.mamba_ssm").selective_state_update(
              h, x, dt, -a.exp(), b, c, d, torch.zeros_like(d), dt_softplus=True, null_block_id=-1, out=out),
              torch.empty_like(x)), h), ssm),
    Entry("rms_norm_gated", "x=7x96,w=96,z=7x96",
          lambda x, w, z: _layer("mamba.ops.layernorm_gated").rms_norm_gated(x, w, None, z, group_size=32),
          lambda x, w, z: F.rms_norm(x.unflatten(1, (3, 32)), (32,), None, 1e-6).flatten(1) * w * F.silu(z)),
    Entry("awq_dequantize", "q=64x6:i32<2000000000,s=2x48:fp16,z=2x6:i32<2000000000",
          lambda q, s, z: _layer("quantization.awq_triton").awq_dequantize_triton(q, s, z), unpacked_awq),
    Entry("awq_gemm", "x=7x64:fp16,q=64x6:i32<2000000000,s=2x48:fp16,z=2x6:i32<2000000000",
          lambda x, q, s, z: _layer("quantization.awq_triton").awq_gemm_triton(x, q, s, z, 1),
          lambda x, q, s, z: x @ unpacked_awq(q, s, z).half().double()),
    Entry("scaled_mm", "a=20x64:i8<100,b=96x64:i8<100,s=20x1,t=96x1",
          lambda a, b, s, t: _layer("quantization.compressed_tensors.triton_scaled_mm").triton_scaled_mm(
              a, b.T, s, t, torch.bfloat16, use_td=False),
          lambda a, b, s, t: s * (a.double() @ b.double().T) * t.T),
    Entry("gather_initial_states twice", "s=5x3x40,i=4:i64<5,j=6:i64<4,u=4:bool,v=6:bool",
          lambda s, i, j, u, v: (call := _layer("mamba.ops.gather_initial_states").gather_initial_states)(
              call(s, i, u), j, v),
          lambda s, i, j, u, v: (s[i] * u[:, None, None])[j] * v[:, None, None]),
    Entry("bmm on two streams", "x=3x37x70:bf16,v=3x70x48:bf16,w=48:bf16",
          lambda x, v, w: _invariant().bmm_batch_invariant(*_beside(
              lambda: _invariant().softmax(x), lambda: _invariant().rms_norm_batch_invariant(v, w))),
          lambda x, v, w: x.softmax(-1) @ F.rms_norm(v, (48,), w, 1e-6), allowed=2),
    Entry("mean_dim on two streams", "x=7x99", lambda x: _invariant().mean_dim(_beside(
              lambda: _invariant().softmax(x), lambda: _invariant().log_softmax(x))[1], 1),
          lambda x: x.log_softmax(-1).mean(1)),
)  # fmt: skip
PROJECT = Project(SOURCE, ENTRIES)

"""Kernels of LightLLM: decoding over a table of tokens, prefill, rotary embeddings, quantized caches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from compatibility.entries import Entry, Project, interleaved, into, ints, rotated
from compatibility.sources import Source

SOURCE = Source("LightLLM", "lightllm==0.0.1", "lightllm/", ("lightllm.utils", "lightllm_ppl_kernel"))
LENGTHS = [37, 5]
"""Of the two sequences, of which tokens lie in the order of `_table`."""
PAIR = "q=2x4x32:fp16,k=60x2x32:fp16,v=60x2x32:fp16"
PROMPT = "q=42x4x32:fp16,k=42x2x32:fp16,v=42x2x32:fp16"
_llama = SOURCE.below("lightllm.models.llama.triton_kernel")
_common = SOURCE.below("lightllm.common.basemodel.triton_kernel")


def _table() -> torch.Tensor:
    """Where the tokens of both sequences lie."""
    return torch.randperm(60, generator=torch.Generator().manual_seed(1)).int()[:58].view(2, 29).repeat(1, 2)[:, :40]


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled products of each sequence's query with its keys, one sequence behind the other."""
    found = [
        torch.einsum("hd,nhd->hn", q[b], k[_table()[b, :n].long()].repeat_interleave(2, 1)) / q.shape[-1] ** 0.5
        for b, n in enumerate(LENGTHS)
    ]
    return torch.cat(found, -1)


def _summed(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    found = [
        torch.einsum("hn,nhd->hd", part, v[_table()[b, :n].long()].repeat_interleave(2, 1))
        for b, (n, part) in enumerate(zip(LENGTHS, torch.split(p, LENGTHS, -1), strict=True))
    ]
    return torch.stack(found)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.softmax(-1) for part in torch.split(scores, LENGTHS, -1)], -1)


def _decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _summed(_softmax(_scores(q, k)), v)


def _prefilled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 1000) -> torch.Tensor:
    """Causal attention of each sequence to itself."""
    found = []
    for one in zip(*(torch.split(x, LENGTHS) for x in (q, k, v)), strict=True):
        a, b, c = (x.transpose(0, 1).repeat_interleave(4 // x.shape[1], 0) for x in one)
        seen = (
            torch.ones(a.shape[1], a.shape[1]).tril().bool()
            & torch.ones(a.shape[1], a.shape[1]).triu(1 - window).bool()
        )
        found.append(F.scaled_dot_product_attention(a, b, c, seen).transpose(0, 1))
    return torch.cat(found)


def _half_interleaved(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat([interleaved(x[..., :half], t), x[..., half:]], -1)


def _rotary(module: Any, q: torch.Tensor, k: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    module.rotary_emb_fwd(q, k, t.cos(), t.sin())
    return q, k


def _quantized(k: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = k.float().reshape(*k.shape[:-1], -1, group)
    scale = (parts.abs().amax(-1) / 127.0).half()
    return (parts / scale[..., None].float()).to(torch.int8).flatten(-2).flip(0), scale.flip(0)


def _penalised(x: torch.Tensor, p: torch.Tensor, f: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    for row in range(3):
        ids = torch.arange(row, 50, 7)
        rep = torch.where(x[row, ids] > 0, x[row, ids] / r[row], x[row, ids] * r[row])
        out[row, ids] = rep - (torch.arange(len(ids)) % 3 + 1) * f[row] - p[row]
    return out


def _apply_penalty(x: torch.Tensor, p: torch.Tensor, f: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    ids = [torch.arange(row, 50, 7).int() for row in range(3)]
    ends = ints(0, *torch.tensor([len(part) for part in ids]).cumsum(0).tolist())
    counts = torch.cat([torch.arange(len(part)).int() % 3 + 1 for part in ids])
    _common("apply_penalty").apply_penalty(x, p, f, r, torch.cat(ids), counts, ends, max(map(len, ids)))
    return x


def _indexed(lengths: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(5, 20, dtype=torch.int32)
    out[[3, 0, 4], lengths.long()] = index
    return out


def _flash_decoding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mid, sums, out = torch.zeros(2, 4, 3, 32), torch.zeros(2, 4, 3), torch.empty_like(q)
    _llama("flash_decoding_stage1").flash_decode_stage1(
        q, k, v, _table(), ints(0, 1), ints(*LENGTHS), 40, mid, sums, 16
    )
    _llama("flash_decoding_stage2").flash_decode_stage2(mid, sums, ints(*LENGTHS), out, 16)
    return out


def _gqa_flash_decoding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mid, sums, out = torch.zeros(2, 4, 3, 32), torch.zeros(2, 4, 3), torch.empty_like(q)
    _llama("gqa_flash_decoding_stage1").flash_decode_stage1(
        ints(0, 0, 0, 1), ints(0, 16, 32, 0), q, k, v, _table(), ints(0, 1), ints(*LENGTHS), mid, sums, 16
    )
    _llama("gqa_flash_decoding_stage2").flash_decode_stage2(mid, sums, ints(*LENGTHS), out, 16)
    return out


def _prompt(module: Any, *options: Any) -> Any:
    return lambda q, k, v: into(
        lambda out: module()(q, k, v, out, ints(0, 37), ints(*LENGTHS), 37, *options), torch.empty_like(q)
    )


TABLES = (ints(0, 1), ints(0, 37), ints(*LENGTHS))
ENTRIES = (
    Entry("rmsnorm", "x=7x96:bf16,w=96:bf16", lambda x, w: _llama("rmsnorm").rmsnorm_forward(x, w, 1e-6),
          lambda x, w: F.rms_norm(x, (96,), w, 1e-6)),
    Entry("silu_and_mul", "x=7x96", lambda x: _llama("silu_and_mul").silu_and_mul_fwd(x),
          lambda x: F.silu(x[:, :48]) * x[:, 48:]),
    Entry("rotary", "q=19x5x32,k=19x2x32,t=19x16", lambda q, k, t: _rotary(_llama("rotary_emb"), q, k, t),
          lambda q, k, t: (rotated(q, t), rotated(k, t))),
    Entry("rotary of ChatGLM", "q=19x5x32,k=19x2x32,t=19x8",
          lambda q, k, t: _rotary(SOURCE.module("lightllm.models.chatglm2.triton_kernel.rotary_emb"), q, k, t),
          lambda q, k, t: (_half_interleaved(q, t), _half_interleaved(k, t))),
    Entry("apply_penalty", "x=3x50,p=3,f=3,r=3", _apply_penalty, _penalised),
    Entry("copy_kv_index_to_req", "n=3:i32<20,i=3:i32<900",
          lambda n, i: into(lambda out: _common("copy_kv_index_to_req").copy_kv_index_to_req(
              out, ints(3, 0, 4), n + 1, i), torch.zeros(5, 20, dtype=torch.int32)), _indexed),
    Entry("destindex_copy_kv", "k=7x3x32",
          lambda k: into(lambda out: _common("destindex_copy_kv").destindex_copy_kv(
              k, torch.arange(6, -1, -1).int(), out), torch.empty_like(k)), lambda k: k.flip(0)),
    Entry("destindex_copy_quantize_kv", "k=7x3x32:fp16",
          lambda k: (out := torch.zeros(7, 3, 32, dtype=torch.int8), scale := torch.zeros(7, 3, 1, dtype=torch.float16),
                     _common("destindex_copy_kv").destindex_copy_quantize_kv(
                         k, torch.arange(6, -1, -1).int(), out, scale))[:2],
          lambda k: _quantized(k, 32)),
    Entry("ppl_quant_copy_kv", "k=7x3x32:fp16",
          lambda k: (out := torch.zeros(7, 3, 32, dtype=torch.int8), scale := torch.zeros(7, 3, 4, dtype=torch.float16),
                     _llama("ppl_quant_copy_kv").destindex_copy_quantize_kv(
                         k, torch.arange(6, -1, -1).int(), out, scale))[:2],
          lambda k: _quantized(k, 8)),
    Entry("token_attention scores", PAIR,
          lambda q, k, v: into(lambda out: _llama("token_attention_nopad_att1").token_att_fwd(
              q, k, out, _table(), *TABLES, 37), torch.empty(4, 42, dtype=q.dtype)),
          lambda q, k, v: _scores(q, k), allowed=2),
    Entry("token_attention softmax", "x=4x42",
          lambda x: into(lambda out: _llama("token_attention_nopad_softmax").token_softmax_fwd(
              x, *TABLES[1:], out, 37), torch.empty_like(x)), _softmax),
    Entry("token_attention sum", "p=4x42,v=60x2x32",
          lambda p, v: into(lambda out: _llama("token_attention_nopad_reduceV").token_att_fwd2(
              p, v, out, _table(), *TABLES), torch.empty(2, 4, 32)), _summed),
    Entry("token_attention softmax and sum", "p=4x42,v=60x2x32",
          lambda p, v: into(lambda out: _llama("token_attention_softmax_and_reducev").token_softmax_reducev_fwd(
              p, v, out, _table(), *TABLES, 0), torch.empty(2, 4, 32)), lambda p, v: _summed(_softmax(p), v)),
    Entry("flash_decoding", PAIR, _flash_decoding, _decoded),
    Entry("gqa_flash_decoding", PAIR, _gqa_flash_decoding, _decoded, allowed=2),
    Entry("gqa_decode_attention", PAIR,
          lambda q, k, v: into(lambda out: _llama("gqa_decode_flashattention_nopad").gqa_decode_attention_fwd(
              q, k, v, out, _table(), ints(0, 1), ints(*LENGTHS)), torch.empty_like(q)), _decoded, allowed=2),
    Entry("context_attention", PROMPT,
          _prompt(lambda: _llama("context_flashattention_nopad").context_attention_fwd_no_prompt_cache),
          _prefilled, allowed=2),
    Entry("context_attention with a window", PROMPT,
          _prompt(lambda: SOURCE.module("lightllm.models.mistral.triton_kernel.context_flashattention_nopad")
                  .context_attention_fwd, 9), lambda q, k, v: _prefilled(q, k, v, 9), allowed=2),
    Entry("dequantize int8", "a=7x64:fp16,b=64x96:i8<100,s=1x96:fp16",
          lambda a, b, s: _common("dequantize_gemm_int8").matmul_dequantize_int8(a, b, s),
          lambda a, b, s: a @ (b * s).half().double()),
    Entry("quantize int8 by rows", "x=7x64:fp16", lambda x: _common("quantize_gemm_int8").quantize_int8_perrow(x),
          lambda x: ((x.float() / (x.float().abs().amax(1, True) / 127)).to(torch.int8),
                     (x.abs().amax(1) / 127).half())),
    Entry("matmul int8", "a=20x64:i8<100,s=20:fp16,b=64x96:i8<100,t=96:fp16",
          lambda a, s, b, t: into(lambda out: _common("quantize_gemm_int8").matmul_int8(a, s, b, t, out),
                                   torch.empty(20, 96)),
          lambda a, s, b, t: (a.double() @ b.double()) * s[:, None] * t / 1.0),
)  # fmt: skip
PROJECT = Project(SOURCE, ENTRIES)

"""A fake FlashInfer for the tests: the part of 0.7.2 that the adapters call, computed by the reference's formula.

It keeps FlashInfer's conventions: a log-sum-exp of base 2, large finite numbers in rows that see no key, metadata that
`plan` copies, and a `run` that knows only the lengths that the last `plan` was given.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from rooflab.reference.attention import Scores, attend, seen_keys

Tensor = torch.Tensor
NOTHING_SEEN = (7.0, -5e4)
"""What the fake leaves in the output and the log-sum-exp of such a row."""


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, plan: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """One sequence: q (T, H, D), k and v (S, H_kv, D)."""
    # `kv_len must be greater than or equal to qo_len`, say its kernels for Ampere of one sequence; those of a batch do
    # not look, and mask too little.
    assert not causal or len(q) <= len(k) or not len(k), "more queries than keys"
    window = plan["window_left"] + 1 or None
    seen = seen_keys(len(q), len(k), causal or window is not None, window)
    out, lse = attend(q, k, v, seen, Scores(plan["sm_scale"], plan["logits_soft_cap"]))
    blind = (seen.counts == 0)[:, None]
    lse = torch.where(blind, NOTHING_SEEN[1], lse / math.log(2))
    return out.masked_fill(blind[..., None], NOTHING_SEEN[0]), lse


OPTIONS = ("causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type")
HEADS = ("num_qo_heads", "num_kv_heads", "head_dim_qk")
PAGES = ("kv_indptr", "indices", "last_page_len")


class Wrapper:
    """What all wrappers share."""

    made: list[Wrapper] = []
    names: tuple[str, ...] = ()
    """The arguments of `plan` before its options, in order."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **options: Any):
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD"
        self.options = options
        self.planned: dict[str, Any] = {}
        self.plans = 0
        Wrapper.made.append(self)

    def plan(self, *told: Any, **named: Any) -> None:
        """Copies what it is told."""
        given = {"causal": False, "window_left": -1, "logits_soft_cap": None, **named}
        assert given.keys() <= {*OPTIONS, *self.names[len(told) :]}
        given |= dict(zip(self.names, told, strict=False))
        assert given.keys() >= {*self.names} and given["q_data_type"] == given["kv_data_type"]
        for name in ("qo_indptr", "kv_indptr", "last_page_len"):
            assert name not in given or (given[name].dtype, given[name].device.type) == (torch.int32, "cpu")
        self.planned = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        self.heads = tuple(given[name] for name in HEADS)
        self.plans += 1

    def sequences(self, q: Tensor, keys: list[tuple[Tensor, Tensor]], return_lse: bool) -> Any:
        """Attention of each sequence, as `run` returns it."""
        assert q.dtype == self.planned["q_data_type"]
        outs, lses = [], []
        bounds = self.planned["qo_indptr"].tolist()
        for start, end, (k, v) in zip(bounds, bounds[1:], keys, strict=False):
            out, lse = attended(q[start:end], k, v, self.planned["causal"], self.planned)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs).to(q.dtype), torch.cat(lses).float()
        assert out.shape[0] == len(q), "a plan for other queries"
        return (out, lse) if return_lse else out

    def pages(self, cache: Tensor) -> list[Tensor]:
        """Each planned sequence's tokens in order."""
        size = self.planned["page_size"]
        assert cache.shape[1] == size
        found, indptr = [], self.planned["kv_indptr"].tolist()
        for start, end, last in zip(indptr, indptr[1:], self.planned["last_page_len"].tolist(), strict=False):
            assert (1 <= last <= size) if end > start else last == 0
            length = max(0, end - start - 1) * size + last
            found.append(cache[self.planned["indices"][start:end].long()].flatten(0, 1)[:length])
        return found


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Ragged prefill."""

    names = ("qo_indptr", "kv_indptr", *HEADS)

    def run(self, q, k, v, *, return_lse=False):
        assert self.heads == (q.shape[1], k.shape[1], q.shape[2])
        bounds = self.planned["kv_indptr"].tolist()
        keys = [(k[start:end], v[start:end]) for start, end in itertools.pairwise(bounds)]
        return self.sequences(q, keys, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Prefill through pages."""

    names = ("qo_indptr", *PAGES, *HEADS, "page_size")

    def run(self, q, paged_kv_cache, *, return_lse=False):
        k, v = paged_kv_cache
        assert self.heads == (q.shape[1], k.shape[2], q.shape[2])
        return self.sequences(q, list(zip(self.pages(k), self.pages(v), strict=True)), return_lse)


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Decode: one query for each sequence."""

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, *others, **options):
        group = num_qo_heads // num_kv_heads
        assert self.options["use_tensor_cores"] or group in (1, 2, 3, 4, 6, 8), f"Unsupported group_size: {group}"
        queries = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        told = queries, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, *others
        super().plan(*told, causal=True, **options)


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Latents."""

    names = ("qo_indptr", *PAGES, *HEADS, "page_size")

    def plan(self, *, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, **others):
        counts = kv_indptr.diff()
        assert torch.equal(counts, (kv_len_arr + page_size - 1) // page_size)
        last = kv_len_arr - (counts - 1).clamp(min=0) * page_size
        named = {"kv_indptr": kv_indptr, "indices": kv_indices, "last_page_len": last, "page_size": page_size}
        super().plan(**named, **dict(zip(HEADS, (num_heads, head_dim_ckv, head_dim_kpe), strict=True)), **others)

    def run(self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, *, return_lse=False):
        assert self.heads == (q_nope.shape[1], q_nope.shape[2], q_pe.shape[2])
        q = torch.cat((q_nope, q_pe), dim=-1)
        values = [found[:, None] for found in self.pages(ckv_cache)]
        keys = [torch.cat((v, r[:, None]), -1) for v, r in zip(values, self.pages(kpe_cache), strict=True)]
        return self.sequences(q, list(zip(keys, values, strict=True)), return_lse)


def single_prefill_with_kv_cache(
    q, k, v, *, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None, return_lse=False
):
    """One sequence."""
    plan = {"sm_scale": sm_scale, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
    out, lse = attended(q, k, v, causal, plan)
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)

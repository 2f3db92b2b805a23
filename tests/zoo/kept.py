"""Wrong kernels that are right at their first call: a later call uses what an earlier call kept."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.kernels.speculative_verify.naive import naive as speculative_verify

from .entries import Kind
from .parts import added

state = Kind(__name__, "kept state")
memory: dict[Any, Any] = {}
"""What the kernels keep; a key begins with a word of its kernel's own."""
kept = memory.setdefault


state.changes(
    {
        # The result's memory is kept by shape, and the next call writes over what this one returned.
        "softmax/result_is_kept": lambda of: kept(
            ("softmax", of.x.shape, of.x.dtype), torch.empty(of.x.shape, dtype=of.x.dtype)
        ).copy_(of.right()),
        # The weight in fp32 is kept by address, and other weights may lie there later.
        "rmsnorm/weight_by_its_address": lambda of: {
            "weight": kept(("norm", of.weight.data_ptr(), len(of.weight)), of.weight.to(torch.float32, copy=True)).to(
                of.weight.dtype
            )
        },
        # Rows are dealt to experts once for a number of rows and experts.
        "gemm_grouped/plan_by_its_size": lambda of: {
            "offsets": kept(("groups", len(of.a), len(of.b)), of.offsets.clone())
        },
        # The table is copied once for an address and shape, but an engine writes every step's pages there.
        "mla_decode/table_by_its_address": lambda of: {
            "block_table": kept(
                ("table", of.block_table.data_ptr(), of.block_table.shape), of.block_table.clone()
            ).clamp(0, len(of.kv_cache) - 1)
        },
        # The mask is kept by the numbers of queries and keys, and a call with another window takes the first one's.
        "flash_attention/mask_of_the_first_window": lambda of: {
            "window": kept(("mask", of.q.shape[1], of.k.shape[1], of.causal), of.window)
        },
        # Rows are kept by the addresses of ids and table, but an engine writes every step's ids to one place.
        "embedding/rows_by_the_address_of_the_ids": lambda of: kept(
            (
                "rows",
                of.token_ids.data_ptr(),
                len(of.token_ids),
                of.weight.data_ptr(),
                of.weight.shape,
                of.weight.dtype,
            ),
            of.right(),
        ).clone(),
    }
)


@state.changed("layernorm")
def grid_of_the_first_call(of):
    """The first call for a width decides the grid, and later calls leave rows beyond it 0."""
    out, rows = of.right(), kept(("grid", of.x.shape[1]), len(of.x))
    out[rows:] = 0
    return out


def packed_int8(b, scale):
    """Keeps the scales by shape."""
    memory["int8", *b.shape] = scale.float()
    return b.mT.contiguous()


@state("gemm_w8a16", prepare=packed_int8)
def scale_of_the_last_weight(a, b, scale, bias=None):
    """`prepare` keeps the scales by shape, and so those of the last layer serve all layers."""
    return added(a.float() @ b.mT.float() * memory["int8", b.shape[1], b.shape[0]], bias).to(a.dtype)


@state.changed("kv_cache_write")
def skips_of_the_first_step(of):
    """Which tokens have a slot is found once for a number of tokens; a skipped one counts from the end then."""
    slots, size = of.slot_mapping, len(of.k_cache) * of.k_cache.shape[1]
    return {"slot_mapping": torch.where(kept(("slots", len(of.k)), slots >= 0), slots % size, -1)}


@state("speculative_verify")
def tokens_are_not_cleared(draft_tokens, target_probs, num_drafts, seed, position, *, draft_probs=None):
    """The buffer of tokens is set to -1 once, and behind a short row shows a longer one of an earlier call."""
    args = draft_tokens, target_probs, num_drafts, seed, position
    verified, accepted = speculative_verify(*args, draft_probs=draft_probs)
    tokens = kept(("tokens", verified.shape), torch.full_like(verified, -1))
    tokens[verified >= 0] = verified[verified >= 0]
    return tokens.clone(), accepted

"""Attention over keys and values that lie in pages, found through a block table (Kwon et al., "Efficient memory
management for large language model serving with PagedAttention", SOSP 2023).

The tolerance is `flash_attention`'s, sequence by sequence, with S the sequence's length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rooflab.reference.flash_attention import (
    TILE_EDGES,
    attend,
    attention_cost,
    error_bound,
    get_scale,
    listen,
    low_precision,
    shout,
    visible_keys,
)
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

SPARE_BLOCKS = 3
"""Pages that belong to no sequence; they hold NaN."""


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence's last queries over its cached keys and values, in fp64.

    q: (T, H, D); k_cache, v_cache: (num_blocks, block_size, H_kv, D); block_table: (B, max_blocks) int32, entries
    past a sequence's pages being padding of any value; seq_lens: (B,) int32; returns (T, H, D). Token i of a sequence
    lies at offset i % block_size of page block_table[b, i // block_size]. `cu_seqlens_q` (B + 1,) int32 bounds each
    sequence's queries in q, causal and bottom-right aligned; None is one query per sequence. An empty sequence gives
    0. `softmax_scale` None is D**-0.5.
    """
    scale = get_scale(q, softmax_scale)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b, (start, end, length) in enumerate(_spans(q, seq_lens, cu_seqlens_q)):
        k, v = (_gather(cache, block_table[b], length) for cache in (k_cache, v_cache))
        out[start:end] = attend(q[start:end], k, v, visible_keys(end - start, length, causal=True), scale)
    return out


def _spans(
    q: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> Iterator[tuple[int, int, int]]:
    """First query, one past the last, and length of each sequence."""
    lengths = seq_lens.tolist()
    bounds = list(range(len(lengths) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    return zip(bounds[:-1], bounds[1:], lengths, strict=True)


def _gather(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """A sequence's tokens in order, (length, H_kv, D); reads no slot past its end."""
    token = torch.arange(length, device=cache.device)
    block_size = cache.shape[1]
    return cache[pages.to(cache.device).long()[token // block_size], token % block_size]


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """The bound that `flash_attention` derives, (T, H, D) fp64."""
    q = inputs["q"]
    scale = get_scale(q, inputs.get("softmax_scale"))
    bound = scheme.unit_roundoff * oracle[0].abs()
    for b, (start, end, length) in enumerate(_spans(q, inputs["seq_lens"], inputs.get("cu_seqlens_q"))):
        k, v = (_gather(inputs[name], inputs["block_table"][b], length) for name in ("k_cache", "v_cache"))
        visible = visible_keys(end - start, length, causal=True)
        bound[start:end] += error_bound(q[start:end], k, v, visible, scale, scheme)
    return (bound,)


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Decode inputs with pages in shuffled order; NaN fills unused pages and the tail of each last page.

    With `ragged` the lengths vary by seed: one sequence has `context` tokens, and of three or more one is empty.
    """
    B, H, H_kv, D = (int(case[key]) for key in ("B", "H", "H_kv", "D"))
    context, block_size = int(case["context"]), int(case["block_size"])
    dtype = scheme.activation
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((B,), context, dtype=torch.int32)
    if case["ragged"]:
        lengths = torch.randint(0, context + 1, (B,), generator=generator, dtype=torch.int32)
        lengths[0] = context
        if B >= 3:
            lengths[B // 2] = 0
    pages = -(-lengths // block_size)
    num_blocks = int(pages.sum()) + SPARE_BLOCKS
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    table = torch.full((B, int(pages.max()) + 1), -1, dtype=torch.int32)
    unused = torch.ones(num_blocks, block_size, dtype=torch.bool)
    for b, (count, length) in enumerate(zip(pages.tolist(), lengths.tolist(), strict=True)):
        mine, order = order[:count], order[count:]
        table[b, :count] = mine
        unused[mine.long()] = (torch.arange(count * block_size) >= length).view(count, block_size)
    shape = (num_blocks, block_size, H_kv, D)
    k_cache = randn(*shape, dtype=dtype, device=device, seed=seed + 1)
    v_cache = randn(*shape, dtype=dtype, device=device, seed=seed + 2)
    place = device
    if device.type == "meta":
        place = torch.device("cpu")
    else:
        for cache in (k_cache, v_cache):
            cache[unused.to(device)] = math.nan
    return {
        "q": randn(B, H, D, dtype=dtype, device=device, seed=seed),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table.to(place),
        "seq_lens": lengths.to(place),
    }


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """One dominant key at each page and tile edge and at the ends; one past the end, which must stay unseen."""
    context, block_size = int(case["context"]), int(case["block_size"])
    edges = {*TILE_EDGES, block_size - 1, block_size, context - block_size, context - 2, context - 1}
    for position in sorted(edges | {context}):
        if not 0 <= position <= context or context == 0:
            continue
        inputs = make_inputs(case, scheme, device, seed)
        listen(inputs["q"], inputs["k_cache"])
        label = f"key {position}" if position < context else "one past the last key"
        reached = False
        for b, length in enumerate(inputs["seq_lens"].tolist()):
            # Where a sequence is shorter, the same slot past its end shouts, and must not be heard.
            page = int(inputs["block_table"][b, position // block_size])
            if page >= 0 and (position < length or position == length):
                shout(inputs["k_cache"], inputs["v_cache"], (page, position % block_size))
                reached = True
        if reached:
            yield label, inputs
    yield from low_precision(make_inputs(case, scheme, device, seed), "q", "k_cache", "v_cache")


def cost(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
) -> Cost:
    """Two products over the visible pairs; each slot that any sequence uses is read once, shared pages once."""
    _, H, D = q.shape
    pairs, queries = 0, 0
    for start, end, length in _spans(q, seq_lens, cu_seqlens_q):
        visible = visible_keys(end - start, length, causal=True)
        pairs += H * int(visible.sum())
        queries += int((visible > 0).sum())
    slots, entries = used_slots(block_table, seq_lens, k_cache.shape[0], k_cache.shape[1])
    slot_bytes = 2 * k_cache.shape[2] * D * k_cache.element_size()
    read = queries * H * D * q.element_size() + slots * slot_bytes
    read += entries * block_table.element_size() + nbytes(seq_lens, cu_seqlens_q)
    return attention_cost(pairs, D, q, read)


def used_slots(block_table: torch.Tensor, seq_lens: torch.Tensor, num_blocks: int, block_size: int) -> tuple[int, int]:
    """How many cache slots hold a token of some sequence, each once, and how many table entries name a page."""
    lengths = seq_lens.cpu().long()[:, None]
    first = torch.arange(block_table.shape[1]) * block_size
    filled = (lengths - first).clamp(0, block_size)  # (B, max_blocks): tokens in each page
    named = filled > 0
    per_block = torch.zeros(num_blocks, dtype=torch.int64)
    per_block.scatter_reduce_(0, block_table.cpu().long()[named], filled[named], "amax")
    return int(per_block.sum()), int(named.sum())


def _case(B: int, context: int, H: int, H_kv: int, D: int, block_size: int = 16, ragged: bool = False) -> Case:
    return Case(B=B, context=context, H=H, H_kv=H_kv, D=D, block_size=block_size, ragged=ragged)


def _decode(H: int, H_kv: int, D: int) -> tuple[Case, ...]:
    return tuple(_case(B, context, H, H_kv, D) for B in (1, 16) for context in (512, 4096))


SPEC = OpSpec(
    name="paged_attention",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out",),
    tolerance=tolerance,
    planted=planted,
    cases={
        "smoke": (
            _case(2, 40, 4, 2, 64),
            _case(4, 100, 9, 3, 64, ragged=True),
            _case(1, 33, 8, 1, 128),
        ),
        "edge": (
            *(_case(1, context, 3, 1, 64) for context in (0, 1, 15, 16, 17)),
            *(_case(1, context, 4, 1, 128) for context in (31, 32, 33, 63, 64, 65)),
            _case(2, 129, 8, 1, 64),
            _case(3, 50, 2, 2, 64, ragged=True),
            _case(5, 70, 9, 3, 64, block_size=8, ragged=True),
            _case(3, 90, 4, 4, 128, block_size=32, ragged=True),
            _case(2, 40, 16, 1, 64, block_size=1, ragged=True),
            _case(2, 270, 6, 2, 64, block_size=256, ragged=True),
            _case(2, 130, 20, 1, 64, block_size=24),
        ),
        "smollm2_135m": _decode(9, 3, 64),
        "qwen3_0_6b": _decode(16, 8, 128),
        "llama3_8b": (*_decode(32, 8, 128), _case(16, 4096, 32, 8, 128, ragged=True)),
    },
)

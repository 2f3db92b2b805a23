"""Wrong kernels that read or write other pages or slots than the table, the lengths and the mapping name."""

from __future__ import annotations

import torch

from .entries import Kind, with_first

pages = Kind(__name__, "pages and slots")


def behind(table, lengths, block_size):
    """The number of each sequence's pages, and the table's entry behind them (-1: none)."""
    used = -(-lengths.long() // block_size)
    padded = torch.cat((table, torch.full_like(lengths, -1)[:, None]), 1)
    return used, padded.gather(1, used[:, None])[:, 0]


@pages.changed("paged_attention")
def padding_is_a_valid_page(of):
    """The sequence ends at the first entry that is no page: a valid page behind it is attended to."""
    used, entry = behind(of.block_table, of.seq_lens, of.k_cache.shape[1])
    valid = (entry >= 0) & (entry < len(of.k_cache)) & (used > 0)
    return {"seq_lens": torch.where(valid, (used + 1) * of.k_cache.shape[1], of.seq_lens).int()}


@pages.changed("paged_attention")
def shared_pages(of):
    """A page that an earlier sequence has too is read one page further on."""
    table, seen = of.block_table.clone(), set()
    for row, used in zip(table, (-(-of.seq_lens // of.k_cache.shape[1])).tolist(), strict=True):
        own = row[:used].tolist()
        row[:used] = torch.tensor([(page + (page in seen)) % len(of.k_cache) for page in own], dtype=torch.int32)
        seen |= set(own)
    return {"block_table": table}


@pages.changed("paged_attention")
def pages_before_the_window(of):
    """Page by page, an online softmax gives NaN if the first page lies before the window of the only query."""
    if of.window is None or of.cu_seqlens_q is not None:
        return {}
    unseen = of.seq_lens - of.window >= of.k_cache.shape[1]
    return with_first(of.right(), lambda out: out.masked_fill(unseen[:, None, None], torch.nan))


@pages.changed("paged_attention")
def sequence_without_queries(of):
    """A sequence behind one without queries reads that one's pages and length."""
    if of.cu_seqlens_q is None:
        return {}
    queries = of.cu_seqlens_q.diff().tolist()
    own = [b - 1 if b and not queries[b - 1] else b for b in range(len(queries))]
    return {"block_table": of.block_table[own], "seq_lens": of.seq_lens[own]}


pages.changes(
    {
        # In pages of more than 64 tokens, the 65th is read as the first again.
        "mla_decode/pages_above_64": lambda of: {"kv_cache": of.kv_cache[:, torch.arange(of.kv_cache.shape[1]) % 64]},
        # A sequence has the length of the first, if that is shorter: the scores have no more room.
        "mla_decode/length_of_the_first": lambda of: {"seq_lens": of.seq_lens.clamp(max=of.seq_lens[:1])},
        # The last slot of the cache is not written.
        "kv_cache_write/last_slot": lambda of: {
            "slot_mapping": of.slot_mapping.masked_fill(
                of.slot_mapping == len(of.k_cache) * of.k_cache.shape[1] - 1, -1
            )
        },
    }
)


@pages("kv_cache_write")
def skipped_tokens_keep_slot_0(k, v, k_cache, v_cache, slot_mapping):
    """A skipped token stores what slot 0 held before, perhaps over another token's value."""
    slots, kept = slot_mapping.clamp(min=0), (slot_mapping >= 0)[:, None, None]
    for cache, new in ((k_cache, k), (v_cache, v)):
        rows = cache.flatten(0, 1)
        for slot, row in zip(slots.tolist(), torch.where(kept, new, rows[slots]), strict=True):
            rows[slot] = row

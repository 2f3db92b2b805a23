"""RIGHT.  Slots look for tokens, not tokens for slots: an inverse table gives each slot its token or -1, and then
the pages that get a token are gone through from the last to the first, and their rows are written together."""

import torch

from rooflab.kernels.registry import register


@register(op="kv_cache_write", name="page_by_page", role="optimized", backend="torch")
def kv_cache_write(k, v, k_cache, v_cache, slot_mapping):
    pages, block_size = k_cache.shape[:2]
    owner = torch.full((pages * block_size + 1,), -1, dtype=torch.int64, device=k.device)
    tokens = torch.arange(len(slot_mapping), device=k.device)
    owner[slot_mapping] = tokens  # a slot of -1 goes to the spare entry at the end
    owner = owner[:-1].view(pages, block_size)
    for page in reversed(torch.nonzero((owner >= 0).any(dim=1)).flatten().tolist()):
        offsets = torch.nonzero(owner[page] >= 0).flatten()
        k_cache[page, offsets] = k[owner[page, offsets]]
        v_cache[page, offsets] = v[owner[page, offsets]]

"""WRONG.  Rows of 16-bit values are copied as 32-bit words, two values at a time, by views of another dtype.  Such
a view needs an even number of values in a head and an even distance between tokens.  For a head of 33 values, or k
and v that are slices at odd places, it raises an exception."""

import torch

from rooflab.kernels.registry import register


@register(op="kv_cache_write", name="as_words", role="optimized", backend="torch")
def kv_cache_write(k, v, k_cache, v_cache, slot_mapping):
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for new, cache in ((k, k_cache), (v, v_cache)):
        words = cache.view(torch.int32).flatten(0, 1)
        words[slots] = new.view(torch.int32)[kept]

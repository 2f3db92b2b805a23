"""Decode attention over a paged KV cache.  The ladder:

naive       torch steps, a Python loop over sequences: gather, heads expanded, scores in memory, softmax, second product
library     gather the pages into a dense copy, then torch's scaled_dot_product_attention; torch reads no block table
gqa_packed  Triton; one program per (sequence, KV head) walks the block table, so no copy of the cache is made and each
            key is read once for all the query heads of its group
"""

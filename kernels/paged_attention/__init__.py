"""Attention over a paged KV cache: decode steps, and chunks of queries.  The ladder:

naive         torch steps, a Python loop over sequences: gather, heads expanded, scores in memory, softmax, second
              product
library       gather the pages into a dense copy, then torch's scaled_dot_product_attention, which reads no block table
gqa_packed    Triton; one program per (sequence, KV head) walks the block table, so no copy of the cache is made and
              each key is read once for all the query heads of its group; decode only, no options
split_kv      over gqa_packed: CUDA C++, decode; all sequences' keys in equal shares for every CTA that the card holds,
              and a second launch that adds parts up; a warp streams 16 keys at a time by cp.async with no barrier but
              its own.  Predicted: over 90% of HBM's rate at 64 sequences of 4,096 keys and of lengths that differ, and
              at one of 65,536; where shares are 64 keys the second launch shows.  Unmeasured on a GPU
chunked       over gqa_packed: Triton; tiles of queries and their group's heads, so that prefill chunks and decode rows
              go in one launch; a program finds its sequence by bisection.  Unmeasured; predicted to lose to split_kv on
              decode, as nothing is split, and to a dense kernel by the addresses of its gather
tma_pages     over chunked: Gluon; a producer warp copies pages by TMA for two warpgroups.  Predicted: pages of 16 and
              more cost nothing beside the products.  Unmeasured; its tiles have 128 rows, mostly empty on decode
flashinfer    a peer: FlashInfer's batch decode and batch prefill (Ye et al., arXiv 2501.01005), where it is installed;
              planned outside of what is timed
flex          a peer: torch's FlexAttention, compiled, with a block mask made of the table; decode, pages of a power of
              two
torch_varlen  a peer: torch's varlen_attn through a block table, from 2.12 on; pages of 256 tokens, or of any size with
              FlashAttention-3 activated
"""

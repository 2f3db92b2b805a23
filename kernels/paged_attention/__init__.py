"""paged_attention: attention over a paged KV cache, for decode steps and chunks of queries.

naive         torch steps, a Python loop over sequences: gather, heads expanded, scores in memory, softmax, second
              product
library       gathers the pages into a dense copy, then torch's scaled_dot_product_attention, which reads no block table
gqa_packed    Triton; one program per (sequence, KV head) walks the block table, so the cache is not copied and a group
              of query heads reads each key once; decode only, no options
split_kv      over gqa_packed: CUDA C++, decode; the keys of all sequences in equal shares for all CTAs that fit on the
              GPU; the last warp to end its part of a head adds the parts, in the same launch; a warp streams 16 keys at
              a time by cp.async, without a barrier for other warps.  Predicted for an H100: 86% of HBM's rate at 64
              sequences of 1,024 keys, 89% at 4,096 (equal or different lengths), 67% at 16 of 1,024, 87% at one of
              65,536.  Unmeasured on a GPU
chunked       over gqa_packed: Triton; a tile has queries and their group's heads, so prefill chunks and decode rows
              share a launch; a program finds its sequence by bisection.  Unmeasured; predicted slower than split_kv on
              decode, because keys are not split, and slower than a dense kernel, because of its gather's addresses
tma_pages     over chunked: Gluon; a producer warp copies pages by TMA for two warpgroups: one copy for all columns of a
              page, and one load for a block's page numbers.  Predicted: pages of 8 and more cost nothing next to the
              products.  Unmeasured; its tiles have 128 rows, mostly empty on decode
native        over library, on a CPU, in C++: reads pages where they lie, which library gathers; one row's scores are
              dot products, those of a chunk a product of tiles
flashinfer    peer: FlashInfer's batch decode and batch prefill (Ye et al., arXiv 2501.01005), if installed; the bench
              does not time its plan
flash_attention_3
              peer: FlashAttention-3 with pages (Shah et al., arXiv 2407.08608), if installed; decode
flex          peer: torch's FlexAttention, compiled, with a block mask from the table; decode, pages of a power of two
torch_varlen  peer: torch's varlen_attn with a block table, from 2.12 on; pages of 256 tokens, or of any size with
              FlashAttention-3 activated
"""

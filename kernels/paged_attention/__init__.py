"""Kernels of the op paged_attention: attention over a paged KV cache, for decode steps and chunks of queries.

"over x" says what changes compared with the kernel `x`.  A "peer" is another library's kernel, for comparison.

naive              torch steps, a Python loop over sequences: gather, scores in memory, softmax, second matmul
library            gathers the pages into a dense copy, then calls torch's scaled_dot_product_attention
gqa_packed         Triton; one program per sequence and KV head reads the block table; decode only, no options
split_kv           over gqa_packed: CUDA C++, decode; every CTA gets an equal share of keys
chunked            over gqa_packed: Triton; prefill chunks and decode rows share a launch
tma_pages          over chunked: Gluon; a producer warp copies pages by TMA for two warpgroups
native             over library, on a CPU, in C++: reads pages in place
flashinfer         peer: FlashInfer's batch decode and batch prefill (Ye et al., arXiv 2501.01005)
flash_attention_3  peer: FlashAttention-3 with pages (Shah et al., arXiv 2407.08608); decode
flex               peer: torch's FlexAttention, compiled; decode, pages of a power of two
torch_varlen       peer: torch's varlen_attn with a block table, from 2.12 on; pages of 256 tokens, or of any size with
                   FlashAttention-3

No kernel here was measured on a GPU.  docs/notes/paged_attention.md predicts the times.
"""

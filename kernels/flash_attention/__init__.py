"""Kernels of the op flash_attention: attention over dense keys and values.  "over x" says what changes compared with
the kernel `x`.  A "peer" is another library's kernel, for comparison.

naive              torch steps, with all scores `[B, H, T, S]` in fp32 in memory
library            torch's scaled_dot_product_attention; fp8 is dequantized to bf16 in memory first
online             over naive, Triton: one pass over the keys with a running maximum and sum; scores stay on the chip
masked_tiles       over online: a tile has a mask only if the diagonal, a window or the sequence's end crosses it
tma                over masked_tiles: one thread loads q, k and v by tensor maps; fewer registers, so larger tiles
packed_gqa         over tma: the query heads of a group share a tile's rows, for queries shorter than a tile
persistent         over tma: one or two CTAs per SM; each CTA computes several tiles, the longest first
fp8                over tma: q, k and v in e4m3 with one scale per head; a tile takes half of the bytes
ping_pong          over online, Gluon: a producer warp loads; of two consumer warpgroups, one computes the softmax
                   while the other uses the tensor cores (FlashAttention-3)
flash_attention_3  peer: FlashAttention-3 in CUDA (Shah et al., arXiv 2407.08608), if installed
flashinfer         peer: FlashInfer's prefill (Ye et al., arXiv 2501.01005), if installed
sdpa_cudnn         peer: torch's scaled_dot_product_attention with cuDNN's kernel
sdpa_efficient     peer: torch's scaled_dot_product_attention, memory-efficient backend, without grouped heads
sdpa_flash         peer: torch's scaled_dot_product_attention with FlashAttention-2

No kernel here was measured on a GPU.  The compiled and predicted costs and gains are in docs/notes/flash_attention.md.
"""

"""Kernels of the op mla_decode: decode attention over a paged cache of latents, one latent per token for all heads.

naive       torch steps, a Python loop over sequences: gather, scores in memory, softmax, second matmul
library     gathers the pages into a dense copy, then calls torch's scaled_dot_product_attention
split_kv    over naive: Triton; a latent is loaded once as key and value; keys are split over programs to fill the SMs
flashinfer  for comparison: FlashInfer's attention over latents (Ye et al., arXiv 2501.01005), if installed; only
            512 + 64 dimensions
"""

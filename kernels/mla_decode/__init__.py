"""mla_decode: decode attention over a paged cache of latents, one latent per token for all heads.

naive       torch steps, a Python loop over sequences: gather, scores in memory, softmax, second matmul
library     gathers the pages into a dense copy, then torch's scaled_dot_product_attention, with heads in the place of
            queries
split_kv    over naive: Triton; heads are the rows of the tensor cores' tiles, a latent is loaded once as key and value,
            and keys are split over enough programs to fill the SMs; a second launch merges the parts
flashinfer  peer: FlashInfer's attention over latents (Ye et al., arXiv 2501.01005), if installed; only 512 + 64
            dimensions; the bench does not time `plan`, its preparation of a step
"""

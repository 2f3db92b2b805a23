"""Decode attention over a paged cache of latents, one for all heads.  The ladder:

naive       torch steps, a Python loop over sequences: gather, scores in memory, softmax, second product
library     gather the pages into a dense copy, then torch's scaled_dot_product_attention, the heads in the queries'
            place
split_kv    over naive: Triton; heads are the rows of the tensor cores' tiles, a latent is loaded once for key and
            value, and the keys are split over as many programs as fill the SMs, whose parts a second launch merges
flashinfer  a peer: FlashInfer's attention over latents (Ye et al., arXiv 2501.01005), where it is installed; 512 + 64
            dimensions alone, planned outside of what is timed
"""

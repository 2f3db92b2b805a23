"""Attention over sequences of different lengths, one after another with no padding.  The ladder:

naive              torch steps, a Python loop over sequences: heads expanded, scores in memory, softmax, second product
library            torch's FlashAttention-2 with offsets on CUDA in 16 bits; elsewhere scaled_dot_product_attention, a
                   sequence at a time
online             over naive: Triton, one launch for all; a program finds its sequence by its tile, the longest causal
                   rows first, and only tiles that a diagonal, a window or an end cuts are masked
flash_attention_3  a peer: FlashAttention-3 with offsets (Shah et al., arXiv 2407.08608), where it is installed
flashinfer         a peer: FlashInfer's prefill of ragged sequences (Ye et al., arXiv 2501.01005), where it is
                   installed; planned outside of what is timed
torch_varlen       a peer: torch's varlen_attn, the library's kernel or what is activated in its place
"""

"""Attention over sequences of different lengths, one after another with no padding.  The ladder:

naive       torch steps, a Python loop over sequences: heads expanded, scores in memory, softmax, second product
library     torch's FlashAttention-2 with offsets on CUDA in 16 bits; elsewhere scaled_dot_product_attention, a sequence
            at a time
online      over naive: Triton, one launch for all; a program finds its sequence by its tile, the longest causal rows
            first, and only tiles that a diagonal, a window or an end cuts are masked
"""

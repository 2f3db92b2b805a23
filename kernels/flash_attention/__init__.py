"""Attention over dense keys and values.  The ladder:

naive       torch steps: heads expanded, (B, H, T, S) scores in fp32 in memory, softmax, second product
library     torch's scaled_dot_product_attention; its is_causal is top-left, so T < S takes the lower-right bias
online      Triton; one pass over the keys with a running maximum and sum, so that no score leaves the chip
"""

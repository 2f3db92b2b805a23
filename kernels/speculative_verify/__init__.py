"""Kernels of the op speculative_verify: accepts tokens of a draft, and draws the token after them.

naive   torch steps over all rows of target and draft probabilities
fused   Triton, one program per sequence: first the ratios of the drafted tokens,
        then only the row of the last token
"""

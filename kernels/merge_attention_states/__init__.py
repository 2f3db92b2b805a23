"""Attention over all keys, from attention over parts of them.

naive       torch steps: a softmax over the parts' log-sum-exps, and their weighted sum
library     none in torch
fused       over naive: one Triton launch, one pass over the parts with a running maximum, so that every output is
            read once and nothing but the result is written; four parts' outputs are under way at once
"""

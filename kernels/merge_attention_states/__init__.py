"""Attention over all keys, from attention over parts of them.

naive       torch steps: a softmax over the parts' log-sum-exps, and their weighted sum
library     torch has no call for it
fused       over naive: one Triton launch, one pass over the parts with a running maximum, so that every output is
            read once and nothing but the result is written; four parts' outputs are under way at once
"""

"""Kernels of the op merge_attention_states: merges attention outputs over parts of the keys into attention over all
keys.

naive       torch steps: a softmax over the parts' log-sum-exps,
            and a weighted sum of the outputs
library     torch has no call for it
fused       over naive: one Triton launch reads each output once and writes only the result
"""

"""merge_attention_states: attention over all keys from the attention over parts of the keys.

naive       torch steps: a softmax over the parts' log-sum-exps, and their weighted sum
library     torch has no call for it
fused       over naive: one Triton launch makes one pass over the parts with a running maximum: it reads each output
            once and writes only the result; it loads the outputs of four parts at once
"""

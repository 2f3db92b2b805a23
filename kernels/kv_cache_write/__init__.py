"""Kernels of the op kv_cache_write, which writes new keys and values to their slots in the paged cache.  A slot is the
place of one token.

naive       selects the tokens that have a slot by a mask, then writes each cache by index assignment;
            on CUDA the host waits for the device
library     torch has no call for it
index_copy  improves on naive, on the CPU: needs no mask if every token has a slot, as in each decode step
fused       improves on naive: one Triton launch writes keys and values, and skips tokens without a slot;
            the host never waits
"""

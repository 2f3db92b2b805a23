"""Kernels of the op kv_cache_write: writes new keys and values to their slots (places of one token) in the paged cache.

naive       a mask picks the tokens with a slot, then index assignment to each cache; on CUDA the host waits for it
library     torch has no call for it
index_copy  over naive, on the CPU: needs no mask if every token has a slot, as in each decode step
fused       over naive: keys and values in one Triton launch, which skips tokens without a slot;
            the host never waits
"""

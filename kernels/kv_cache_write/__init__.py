"""kv_cache_write: writes new keys and values to their slots (places of one token) in the paged cache.

naive       a mask picks the tokens that have a slot, then index assignment to each cache; on CUDA the host waits for
            the mask
library     torch has no call for it
index_copy  over naive, on the CPU: if every token has a slot, as in each decode step, it needs no mask
fused       over naive: k and v in one Triton launch, which itself skips tokens without a slot, so the host never waits
"""

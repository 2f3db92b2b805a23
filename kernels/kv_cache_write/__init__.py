"""kv_cache_write: new keys and values go to their slots of the paged cache.

naive       a mask of the tokens that have a slot, then index assignment to each cache; on CUDA the mask waits for the
            device
library     torch has no call for it
index_copy  over naive, on the CPU: no mask and no selection where every token has a slot, which is every decode step
fused       over naive: k and v in one Triton launch, which skips tokens itself, so that nothing is compacted and the
            host never waits
"""

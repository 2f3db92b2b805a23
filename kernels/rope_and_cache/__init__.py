"""rope_and_cache: normalizes and rotates new q and k, and writes keys and values to their slots of the paged cache.

naive       torch steps: normalize and rotate q and k, divide by the scales of an fp8 cache, then an index assignment to
            each cache; on CUDA the host waits for the mask of the tokens that have a slot
library     torch has no call for it; torch.compile makes no graph, as only the device knows which tokens have a slot
fused       over naive: one Triton launch; the rotated k goes to the cache without a trip through HBM, and interleaved
            pairs are loaded as vectors and separated in registers; a program of few heads has several tokens
joined      over naive, on a CPU: `rope/joined` and `kv_cache_write/index_copy`, which make fewer calls of torch
native      over joined, on a CPU: one pass in C++
"""

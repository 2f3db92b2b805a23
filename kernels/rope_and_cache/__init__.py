"""Kernels of the op rope_and_cache: normalizes and rotates new q and k, and writes keys and values to the paged cache.

naive       torch steps: normalize, rotate, divide by the scales of an fp8 cache, index assignment to each cache; on
            CUDA the host waits
library     torch has no call for it; torch.compile makes no graph, as only the device knows which tokens to write
fused       over naive: one Triton launch; the rotated k goes to the cache without a trip through HBM
joined      over naive, on a CPU: `rope/joined` and `kv_cache_write/index_copy`, which make fewer calls of torch
native      over joined, on a CPU: one pass in C++
"""

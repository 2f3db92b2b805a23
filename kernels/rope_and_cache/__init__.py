"""New tokens' queries and keys are rotated, keys and values written to their slots of the paged cache.

naive       torch steps: rotate q and k, divide by the scales of an fp8 cache, then an index assignment to each cache;
            on CUDA the mask of the tokens that have a slot waits for the device
library     torch has no call for it
fused       over naive: one Triton launch; the rotated k never goes through HBM on its way to the
            cache, and interleaved pairs are loaded side by side and parted in registers
"""

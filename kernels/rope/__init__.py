"""rope: q and k turned by their positions' angles.

naive    torch steps in fp32, q and then k: some twenty launches, each through HBM
library  torch has no call for it
joined   over naive: q and k joined along the heads, so that each step is one call for both; for the CPU, where a decode
         step pays for the calls, and no less traffic
fused    over naive: q and k in one Triton launch, each value read once and written once; interleaved pairs are loaded
         one value at a time, half-split ones as vectors
"""

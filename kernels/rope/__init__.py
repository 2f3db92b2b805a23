"""rope: rotates q and k by the angles of their positions.

naive    torch steps in fp32, for q and then for k: some twenty launches, each reads and writes HBM
library  torch has no call for it
joined   over naive: q and k joined along the heads, so each step is one call for both; the traffic is the same.  For
         the CPU, where the calls take most of a decode step's time
fused    over naive: q and k in one Triton launch; each value is read once and written once; pairs of neighbours
         (interleaved) are loaded value by value, pairs across the two halves as vectors
"""

"""Kernels of the op rope: rotates q and k by the angles of their positions.

naive    torch steps in fp32, for q and then for k: some twenty launches,
         each reads and writes HBM
library  torch has no call for it
joined   over naive, on a CPU: joins q and k along the heads, so each torch call serves both
fused    over naive: q and k in one Triton launch; each value is read once and written once
"""

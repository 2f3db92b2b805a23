"""Kernels of the op rope, which rotates q and k by the angles of their positions.

naive    torch steps in fp32, for q and then for k: some twenty launches,
         each reads and writes HBM
library  torch has no call for it
joined   improves on naive, for the CPU: joins q and k along the heads, so each torch call serves both
fused    improves on joined: one Triton launch rotates q and k, and reads and writes each value once
"""

"""Kernels of the op gemm_grouped: multiplies each expert's rows of A by the expert's matrix of B.

The rows are sorted by expert.  `offsets`, the first row of each expert, is on the device.  "over x" says what changes
compared with the kernel `x`.

naive        the host reads the offsets and calls one matrix product per expert with rows
library      `torch._grouped_mm`: one CUTLASS launch on Hopper in bf16;
             refused on CUDA if torch would loop instead
grouped      over naive: one Triton launch, in which each CTA finds its expert and tile; for decode
tma          over grouped: TMA loads complete tiles, through one map for all experts
cooperative  over tma: one CTA per SM loops over the tiles; one warp loads, two warpgroups multiply

docs/notes/gemm_grouped.md lists other ideas.
"""

"""softmax: exp(x) divided by the sum of exp(x) along the last axis.

naive    torch steps in fp32: five launches or six, each reads and writes HBM
library  torch.softmax
fused    over naive: one Triton program keeps whole rows in registers; short rows share a program; H <= 16384
cluster  over fused: several 16-byte vectors a thread, a long row over a cluster of up to eight CTAs, a persistent grid

Six ops share the source of `cluster`: kernels/lib/rows.cu.
"""

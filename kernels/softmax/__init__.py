"""Kernels of the op softmax: exp(x) divided by the sum of exp(x) along the last axis.

naive    torch steps in fp32: five or six launches, each reads and writes HBM
library  torch.softmax
fused    over naive: one Triton program keeps whole rows in registers;
         H <= 16384
cluster  over fused: a cluster of up to eight CTAs shares a long row

Six ops share the source of `cluster`, kernels/lib/rows.cu.
"""

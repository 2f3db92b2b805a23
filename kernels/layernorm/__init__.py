"""Kernels of the op layernorm: `(x - mean) / sqrt(variance + eps) * weight + bias`.

naive    torch steps in fp32: ten launches or more, each reads and writes HBM
library  torch.nn.functional.layer_norm
fused    over naive: one Triton program keeps whole rows in registers;
         H <= 16384
cluster  over fused: a cluster of up to eight CTAs shares a long row

Six ops share the source of `cluster`, kernels/lib/rows.cu.
"""

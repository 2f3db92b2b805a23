"""layernorm: (x - mean) / sqrt(variance + eps) * weight + bias.

naive    torch steps in fp32: ten launches or more, each reads and writes HBM
library  torch.nn.functional.layer_norm
fused    over naive: one Triton program keeps whole rows in registers; short rows share a program; H <= 16384
cluster  over fused: several 16-byte vectors a thread, a long row over a cluster of up to eight CTAs, a persistent grid

Six ops share the source of `cluster`: kernels/lib/rows.cu.
"""

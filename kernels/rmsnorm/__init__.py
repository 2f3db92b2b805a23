"""Kernels of the op rmsnorm: `y = x / sqrt(mean(x^2) + eps) * (weight + offset)`.

naive    torch steps in fp32: seven to nine launches, each reads and writes HBM
library  torch.nn.functional.rms_norm: one kernel on CUDA, several on the CPU
fused    over naive: one Triton program keeps whole rows in registers, so x is read once; H <= 16384
cluster  over fused: a cluster of up to eight CTAs shares a long row; outputs may be quantised to int8 or e4m3
native   over library, on a CPU: one call of C++,
         because torch's calls take longer than the work of a few rows

Six ops share the source of `cluster`, kernels/lib/rows.cu.
"""

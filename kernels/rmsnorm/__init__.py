"""rmsnorm: y = x / sqrt(mean(x^2) + eps) * (weight + offset).

naive    torch steps in fp32: seven to nine launches, each reads and writes HBM
library  torch.nn.functional.rms_norm: one kernel on CUDA, several on the CPU
fused    over naive: one Triton program keeps whole rows in registers between their sums of squares and their scaling,
         so x is read once, and short rows share a program; H <= 16384
cluster  over fused: several 16-byte vectors a thread, a long row over a cluster of up to eight CTAs, a persistent grid,
         and outputs quantised to int8 or e4m3 in the same pass
native   over library, on a CPU: one call of C++, where the calls of torch take longer than the work of a few rows

Six ops share the source of `cluster`: kernels/lib/rows.cu.
"""

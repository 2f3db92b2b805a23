"""Kernels of the op fused_add_rmsnorm: `s = x + residual`, and the RMSNorm of `s`.  "over x" says what changes compared
with the kernel `x`.

naive    torch steps, the norm in fp32: eight to ten launches, each reads and writes HBM
library  torch.add and torch.nn.functional.rms_norm; the sum goes to HBM and back
fused    over naive: one Triton program writes the rounded sum and computes its norm in registers; H <= 16384
cluster  over fused: a thread holds several 16-byte vectors, and up to eight CTAs (a cluster) share a long row; the
         grid is persistent, and the output may be quantised to int8 or e4m3
native   over library, on a CPU: one call of C++ for both, so the norm reads the sum from the cache

Six ops share the source of `cluster`: kernels/lib/rows.cu.
"""

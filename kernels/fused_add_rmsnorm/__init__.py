"""Kernels of the op fused_add_rmsnorm: `s = x + residual`, and the RMSNorm of `s`.  "over x" says what changes compared
with the kernel `x`.

naive    torch steps, the norm in fp32: eight to ten launches, each reads and writes HBM
library  torch.add and torch.nn.functional.rms_norm; the sum goes to HBM and back
fused    over naive: one Triton program adds, rounds and writes the sum, and computes its norm in registers; H <= 16384
cluster  over fused: several 16-byte vectors per thread, a long row over a cluster of up to eight CTAs, a persistent
         grid, and outputs quantised to int8 or e4m3 in the same pass
native   over library, on a CPU: one call of C++ for both, so the norm reads the sum from the cache

Six ops share the source of `cluster`: kernels/lib/rows.cu.
"""

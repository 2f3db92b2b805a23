"""fused_add_rmsnorm: s = x + residual, and the rmsnorm of s.

naive    torch steps, the norm in fp32: seven to nine launches, each reads and writes HBM
library  torch.add and torch.nn.functional.rms_norm; the sum goes to HBM and back
fused    over naive: one Triton program per row adds, rounds and writes the sum, and norms it in registers; H <= 16384
native   over library, on a CPU: one call of C++; the norm finds the row in cache
"""

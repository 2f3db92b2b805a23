"""fused_add_rmsnorm: s = x + residual, and the rmsnorm of s.

naive    torch steps, the norm in fp32: seven to nine launches, each through HBM
library  torch.add and torch.nn.functional.rms_norm; the sum goes to HBM and back
fused    over naive: one Triton program per row adds, rounds, writes the sum and norms it from registers; rows of at
         most 16384
"""

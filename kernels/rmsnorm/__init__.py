"""rmsnorm: y = x / sqrt(mean(x^2) + eps) * weight.

naive    torch steps in fp32: six to eight launches, each through HBM
library  torch.nn.functional.rms_norm: one kernel on CUDA, a composition on the CPU
fused    over naive: one Triton program per row, which stays in registers between its sum of squares and its scaling, so
         that x is read once; rows of at most 16384
"""

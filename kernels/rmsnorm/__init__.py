"""rmsnorm: y = x / sqrt(mean(x^2) + eps) * weight.

naive    torch steps in fp32: six to eight launches, each reads and writes HBM
library  torch.nn.functional.rms_norm: one kernel on CUDA, several on the CPU
fused    over naive: one Triton program per row keeps it in registers between its sum of squares and its scaling, so x
         is read once; H <= 16384
native   over library, on a CPU: one call of C++, where the calls of torch take longer than the work of a few rows
"""

"""Kernels of the op silu_and_mul: `silu(gate) * up` for `x = [gate | up]`.

naive    torch steps in fp32: three to five launches, each reads and writes HBM
library  torch.nn.functional.silu and torch.mul; silu(gate) goes to HBM and back,
         rounded to the dtype
fused    over naive: one pass in one Triton launch; silu(gate) stays in registers and is not rounded
cluster  over fused: a thread loads several 16-byte vectors; outputs may be quantised to int8 or e4m3
native   over library, on a CPU: one pass in C++

Six ops share the source of `cluster`, kernels/lib/rows.cu.
"""

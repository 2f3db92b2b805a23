"""silu_and_mul: silu(gate) * up of x = [gate | up].

naive    torch steps in fp32: three to five launches, each reads and writes HBM
library  torch.nn.functional.silu and torch.mul; silu(gate) goes to HBM and back, rounded to the dtype
fused    over naive: one pass in one Triton launch; silu(gate) stays in registers and is not rounded
cluster  over fused: several 16-byte vectors a thread, short rows side by side, a persistent grid, and outputs quantised
         to int8 or e4m3 in the same pass
native   over library, on a CPU: one pass in C++; silu(gate) stays in registers

Both gated activations share the program of `silu_and_mul/fused`.  Six ops share `cluster`: kernels/lib/rows.cu.
"""

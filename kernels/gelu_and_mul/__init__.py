"""Kernels of the op gelu_and_mul: `gelu(gate) * up`, the gated activation of GeGLU, with the tanh form of gelu.  "over
x" says what changes compared with the kernel `x`.

naive    torch steps in fp32: eleven or more launches, each reads and writes HBM
library  torch's gelu, then mul: gelu(gate) goes to HBM and back
fused    over naive: one pass reads gate and up and writes the result; the code of `silu_and_mul/fused`
cluster  over fused: several 16-byte vectors per thread, several short rows per CTA, a persistent grid, and outputs
         quantised to int8 or e4m3 in the same pass
native   over library, on a CPU: one pass in C++

silu_and_mul and gelu_and_mul share the code of `silu_and_mul/fused`.  Six ops share the source of `cluster`:
kernels/lib/rows.cu.
"""

"""Kernels of the op gelu_and_mul: `gelu(gate) * up`, the gated activation of GeGLU, with the tanh form of gelu.  "over
x" says what changes compared with the kernel `x`.

naive    torch steps in fp32: eleven or more launches, each reads and writes HBM
library  torch's gelu, then mul: gelu(gate) goes to HBM and back
fused    over naive: one pass reads gate and up and writes the result
cluster  over fused: a thread holds several 16-byte vectors, and a CTA several short rows; the grid is persistent, and
         the output may be quantised to int8 or e4m3
native   over library, on a CPU: one pass in C++

Six ops share the source of `cluster`: kernels/lib/rows.cu.
"""

"""Kernels of the op gemm_silu_and_mul: `silu(A @ gate) * (A @ up)`.  `B = [gate | up]` has the shape `[K, 2 * I]`.

"over x" says what changes compared with the kernel `x`.

naive        torch steps: a product for gate, one for up, and the activation in fp32; seven launches in 16 bits
library      `torch.mm(A, B)`, `silu` and `torch.mul`, because torch has no single call
fused        over library: one Triton launch; the activation combines gate and up in registers, so only `I` of `2 * I`
             columns are stored; for decode
tma          over fused: TMA loads complete tiles, both halves of B in one box of three dimensions
persistent   over tma: one CTA per SM; the next tile's loads start before the last tile is stored
cooperative  over persistent: one warp loads, two warpgroups multiply and activate

docs/notes/gemm_silu_and_mul.md lists other ideas.
"""

"""Kernels of the op gemm_silu_and_mul: `silu(A @ gate) * (A @ up)`.  `B = [gate | up]` has the shape `[K, 2 * I]`.
"over x" says what changes compared with the kernel `x`.

naive        torch steps: a product for gate, one for up, and the activation in fp32; seven launches in 16 bits
library      `torch.mm(A, B)`, `silu` and `torch.mul`, because torch has no single call; the product goes to HBM and
             back
fused        over library: one Triton launch; a tile of B has columns of gate and of up, and the activation combines
             both products in fp32 registers, so only `I` of `2 * I` columns are stored. Loads by cp.async. For decode:
             tiles go down to 16 rows, and any strides are allowed
tma          over fused: TMA loads complete tiles, both halves of B in one box of three dimensions
persistent   over tma: one CTA per SM; the loads of the next tile start before the last tile is activated and stored
cooperative  over persistent: one warp loads, two warpgroups multiply 64 rows by 256 columns each and activate

Ideas that were tried, predicted or not built: docs/notes/gemm_silu_and_mul.md.
"""

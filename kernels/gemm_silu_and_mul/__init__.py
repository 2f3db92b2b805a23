"""gemm_silu_and_mul: silu(A gate) * (A up), B = (gate | up) being (K, 2 I).

naive        torch steps: a product for gate, one for up, and the activation in fp32, seven launches in 16 bits
library      torch has no single call: `torch.mm` of gate|up, `silu` and `torch.mul`; the product goes to HBM and back
fused        over library: one Triton launch; gate's and up's columns are one tile of B, and they meet in registers in
             fp32, so that half the product's width is stored, once. Loads by cp.async. The rung for decode: its tiles
             go down to 16 rows, and it takes any strides
tma          over fused: whole tiles by TMA, both halves of B in one box of three dimensions
persistent   over tma: one CTA an SM; the loads of the next tile start before the last one is activated and stored
cooperative  over persistent: one warp loads, two warpgroups multiply 64 rows by 256 columns each and activate

Predictions, by arithmetic and unmeasured on a GPU, for llama3_8b's prefill (M=2048, I=14336, K=4096, bf16). The product
takes 486 us at 989.5 TFLOP/s and 608 us at 80% of it, near the best published. The library's `silu` and
`mul` move 294 MB more, 97 us at 90% of an H100's bandwidth and 70 us at 87% of an H200's, so that at equal speed of the
products one launch is 1.16 and 1.12 times as fast, and still 1.05 times where its product is 10% and 6% slower. The
activation costs two special functions an output: 2048 clocks of an SM for a tile of 128 by 128, whose products take
65536; cooperative's consumers pay them together, up to 3%, unless one leads (`lead`).

Losses to expect: with few rows the weights' bytes are all that counts, and the gain is what launches cost. tma hides
neither the fill of its pipeline nor its activation, one CTA of such tiles filling an SM. persistent and cooperative
leave SMs without a tile where M I is small. Compiled by Triton 3.6.0, a loop that might not run makes wgmma wait for
wgmma (ptxas C7515), so that tma's loop always runs.
"""

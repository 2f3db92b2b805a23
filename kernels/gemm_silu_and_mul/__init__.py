"""gemm_silu_and_mul: silu(A gate) * (A up), where B = (gate | up) is (K, 2 I).

naive        torch steps: a product for gate, one for up, and the activation in fp32; seven launches in 16 bits
library      torch has no single call: `torch.mm` of gate|up, `silu` and `torch.mul`; the product goes to HBM and back
fused        over library: one Triton launch; a tile of B has columns of gate and of up, which meet in registers in
             fp32, so only half of the product's width is stored, once. Loads by cp.async. For decode: tiles go down to
             16 rows, and any strides are taken
tma          over fused: whole tiles by TMA, both halves of B in one box of three dimensions
persistent   over tma: one CTA per SM; the loads of the next tile start before the last one is activated and stored
cooperative  over persistent: one warp loads, two warpgroups multiply 64 rows by 256 columns each and activate

Predictions by arithmetic, unmeasured on a GPU, for llama3_8b's prefill (M=2048, I=14336, K=4096, bf16).  The product
takes 486 us at 989.5 TFLOP/s and 608 us at 80% of it, near the best published rate.  The library's `silu` and `mul`
move 294 MB more: 97 us at 90% of an H100's bandwidth, 70 us at 87% of an H200's.  So with equally fast products one
launch is 1.16 and 1.12 times as fast, and still 1.05 times if its product is 10% and 6% slower.  The activation costs
two special functions per output: 2048 clocks of an SM for a tile of 128 x 128, whose products take 65536.  The
consumers of cooperative pay this at the same time, up to 3%, unless one leads (`lead`).

Expected losses: with few rows only the bytes of the weights count, and the gain is the cost of the saved launches.  In
tma nothing hides the fill of the pipeline and the activation, because one CTA of such tiles fills an SM.  persistent
and cooperative leave SMs without a tile if M I is small.  In code of Triton 3.6.0, a loop that might not run makes
wgmma wait for wgmma (ptxas C7515), so tma's loop always runs.
"""

"""gemm_grouped: each expert's rows of A times its own matrix of B; rows sorted by expert, `offsets` on the device.

naive        the host reads the offsets and calls one product per expert with rows
library      `torch._grouped_mm`: one CUTLASS launch on Hopper in bf16; refused on CUDA where torch would loop instead
grouped      over naive: one Triton launch in which each CTA finds its expert and tile; the host reads no offset and
             bounds the grid by the shapes. Loads by cp.async, tiles of 16 rows and more, any strides. For decode
tma          over grouped: whole tiles by TMA, through one map for all experts; stores through pointers
cooperative  over tma: one CTA per SM walks over the existing tiles; one warp loads, two warpgroups multiply; it skips a
             half tile without rows, and stores whole tiles by TMA

Predictions by arithmetic, unmeasured on a GPU.  Mixtral 8x7B's prefill of 2048 tokens (T=4096, N=28672, K=4096, bf16)
is 962 GFLOP, 972 us at 989.5 TFLOP/s, and reads 1.9 GB of weights, 0.6 ms at an H100's bandwidth: products are the
limit.  Groups that end inside a tile add useless products: with tiles of 128 rows 6% (uniform) and 13% (skew 1), with
cooperative's halves of 64 rows 3% and 6%.  Qwen3-30B-A3B's experts have 128 rows each on average: 45% and 58% with 128
rows, 22% and 23% with 64.  In decode only the matrices of the experts with rows count: 470 MB for one token of
Mixtral's gate|up, 156 us at 90% of an H100's bandwidth.

Expected losses: with one expert (`llama3_8b` and the other dense suites) finding the expert only costs time, compared
with gemm.  grouped and tma launch CTAs without a tile: 15 of 16 for one token of Qwen3-30B-A3B.  In decode
cooperative's tiles of 128 rows waste its second consumer.  tma and cooperative load rows of the next expert with a
group's last rows.  In code of Triton 3.6.0, a loop that might not run makes wgmma wait for wgmma (ptxas C7515), so
tma's loop always runs.
"""

"""gemm_grouped: each expert's rows of A times its own matrix of B, rows sorted by expert, `offsets` on the device.

naive        the host reads the offsets and calls a product for each expert that has rows
library      `torch._grouped_mm`: one CUTLASS launch on a Hopper in bf16; what it would loop over is refused on CUDA
grouped      over naive: one Triton launch, in which each CTA finds its expert and tile by itself; the host reads no
             offset and bounds the grid by the shapes. Loads by cp.async, tiles of 16 rows and more, any strides. The
             rung for decode
tma          over grouped: whole tiles by TMA, through one map for all experts; results leave through pointers
cooperative  over tma: one CTA an SM walks over the tiles that there are; one warp loads, two warpgroups multiply; a
             half of a tile without rows is skipped, and whole tiles leave by TMA

Predictions, by arithmetic and unmeasured on a GPU. Mixtral 8x7B's prefill of 2048 tokens (T=4096, N=28672, K=4096,
bf16) is 962 GFLOP, 972 us at 989.5 TFLOP/s, and reads 1.9 GB of weights, 0.6 ms of an H100's bandwidth: products bound
it. Groups that end inside a tile cost products for nothing: by tiles of 128 rows 6% more (uniform) and 13% (skew 1), by
cooperative's halves of 64 rows 3% and 6%. Qwen3-30B-A3B's experts have 128 rows each on average: 45% and 58% more by
128 rows, 22% and 23% by 64. In decode the matrices of the experts that have rows are all that counts: 470 MB for one
token of Mixtral's gate|up, 156 us at 90% of an H100's bandwidth.

Losses to expect: with one expert (`llama3_8b` and the other dense suites) the look-up is pure cost over gemm's rungs,
and CTAs without a tile are launched for nothing by grouped and tma: 15 of 16 for one token of Qwen3-30B-A3B.
cooperative's tiles of 128 rows waste its second consumer in decode. tma and cooperative load rows of the next expert
along with a group's last ones. Compiled by Triton 3.6.0, a loop that might not run makes wgmma wait for wgmma (ptxas
C7515), so that tma's loop always runs.
"""

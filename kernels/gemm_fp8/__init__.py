"""gemm_fp8: C = (a_scale A) (b_scale B) + bias in e4m3, with a bf16 result.

No kernel here has run on a GPU: facts come from the code compiled for sm_90a, and times are predictions.

naive        both operands dequantized to fp32 in memory, one fp32 product: 17 bytes of traffic per byte of operand,
             more with block scales
library      torch._scaled_mm: cuBLASLt on CUDA, with one scale per operand or, if K is a multiple of 512, block scales;
             it promotes its sums unless `fast_accum` is True; on the CPU one scale per operand
fast_accum   over naive: e4m3 by TMA to the fp8 tensor cores, one launch, tiles up to 128 x 256; all of K in Hopper's
             accumulator of 14 bits, so only with `fast_accum=True`, and never with block scales
promoted     over fast_accum: CUDA cores add each 128 of K in fp32, with its block scales; two sets of accumulators, so
             tiles are at most 128 x 128, and a CTA's tensor cores wait while it adds: predicted slower than fast_accum,
             unmeasured
promoted_ws  over promoted: one warp loads, and up to three warpgroups of 64 rows each take turns between wgmma and
             adding; persistent CTAs, TMA stores results during the next tile; predicted the fastest at large M,
             unmeasured
multicast    over promoted_ws, in CUDA C++: a cluster of two CTAs loads the columns of b that both need once, for 43
             bytes from L2 per clock and SM instead of 53; predicted 2% slower where L2 gives them all, because clusters
             round rows up to 384, and faster where it does not; unmeasured
deep_gemm    DeepGEMM's fp8_gemm_nt, if it is installed; block scales only
"""

"""gemm_fp8: C = (a_scale A) (b_scale B) + bias in e4m3, with a bf16 result.

Nothing here has run on a GPU: what follows was read in the code compiled for sm_90a, and times are predictions.

naive        both operands dequantised to fp32 in memory, one fp32 product: 17 bytes of traffic a byte of operand, and
             more with block scales
library      torch._scaled_mm: cuBLASLt on CUDA, with one scale an operand or, where K is a multiple of 512, block
             scales; promotes its sums unless the caller allows `fast_accum`; on the CPU one scale an operand
fast_accum   over naive: e4m3 by TMA to the fp8 tensor cores, one launch, tiles up to 128 x 256; all of K in Hopper's
             accumulator of 14 bits, so only where `fast_accum=True` allows it, and never with block scales
promoted     over fast_accum: each 128 of K is added up in fp32 on CUDA cores, with its block scales; two sets of
             accumulators, so tiles of 128 x 128 at most, and in a CTA the tensor cores rest while it adds: a loss
             against fast_accum, predicted and unmeasured
promoted_ws  over promoted: a warp loads, and up to three warpgroups of 64 rows each take turns between wgmma and
             adding; persistent CTAs, results stored by TMA under the next tile; predicted the fastest at large M,
             unmeasured
deep_gemm    DeepGEMM's fp8_gemm_nt, where it is installed; block scales only
"""

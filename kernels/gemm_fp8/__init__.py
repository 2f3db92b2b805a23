"""Kernels of the op gemm_fp8: `C = (a_scale * A) @ (b_scale * B) + bias` in e4m3, with a bf16 result.

"over x" says what changes compared with the kernel `x`.  A "peer" is another library's kernel, for comparison.

naive        dequantizes both operands to fp32 in memory, then computes one fp32 product
library      torch._scaled_mm: cuBLASLt on CUDA; adds partial sums in fp32 unless `fast_accum` is True
fast_accum   over naive: TMA and the fp8 tensor cores; Hopper's accumulator of 14 bits sums all of K
promoted     over fast_accum: CUDA cores add the sums of each 128 values along K in fp32,
             with the block scales
promoted_ws  over promoted: one warp only loads; a warpgroup adds while another runs wgmma
multicast    over promoted_ws, in CUDA C++: two CTAs of a cluster load their common columns of B once
deep_gemm    peer: DeepGEMM's fp8_gemm_nt, if it is installed; block scales only

No kernel here was measured on a GPU.  docs/notes/gemm_fp8.md predicts the gain of each kernel.
"""

"""Kernels of the op gemm_w8a16: `C = A @ (scale * B) + bias` with bf16 activations.

The weight B has int8 codes, with one scale per column.  "over x" says what changes compared with the kernel `x`.

naive        dequantizes the weight to bf16 in memory, then calls torch's matmul; four launches, 21 bytes per weight
library      torch._weight_int8pack_mm: on a CPU codes become fp32 in registers; on CUDA one thread per output
gemv         over naive, for up to 8 rows of A: reads each code once, dequantizes it in registers, and multiplies by
             mma.m16n8k16
dequant_dot  over naive, for any rows of A: codes are dequantized in registers as the left operand of wgmma
packed       over library, on a CPU: for many rows, converts a block of channels to bf16 in L2, and oneDNN multiplies it
native       over packed, on a CPU, in C++: reads panels of codes once, in order; codes become fp32 as they are loaded

docs/notes/gemm_w8a16.md lists other ideas.  gemm_w4a16 shares the code of `gemv` and `dequant_dot`.
"""

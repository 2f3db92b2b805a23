"""gemm_w8a16: C = A (scale B) + bias; bf16 activations, a weight of int8 codes with one scale per column.

naive        the weight dequantized to bf16 in memory, and torch's matmul; the four launches move 21 bytes per weight
library      torch._weight_int8pack_mm: on a CPU codes become fp32 in registers; on CUDA one thread per output, in fp32
gemv         over naive, up to 8 rows of a: reads each packed code once, 16 bytes per lane; masks and one subtraction
             dequantize it in registers for mma.m16n8k16; K is split over warps until one wave of CTAs fills the GPU
dequant_dot  over naive, any rows of a: codes become the left operand of wgmma in registers, and a is the right operand
             from shared memory; slower than gemv at few rows, because codes pass through shared memory
packed       over library, on a CPU: calls library for few rows; for many rows, library reads the codes again for every
             four rows; packed converts a block of channels to bf16, which stays in L2, and oneDNN multiplies it
native       over packed, on a CPU, in C++: codes in panels that every matmul reads once, in order; they become fp32 as
             they are loaded

Ideas that were tried, predicted or not built: docs/notes/gemm_w8a16.md. Four and eight bits share `gemv`
(kernels/lib/stream.cu) and `dequant_dot` (kernels/lib/dequant_dot.py).
"""

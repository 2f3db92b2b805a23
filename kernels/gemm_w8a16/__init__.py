"""gemm_w8a16: C = A (scale B) + bias; bf16 activations, a weight of int8 codes with one scale per column.

naive        the weight dequantized to bf16 in memory, and torch's matmul: 21 bytes of traffic per weight of one byte
library      torch._weight_int8pack_mm: on a CPU codes become fp32 in registers; on CUDA one thread per output, in fp32
gemv         over naive, up to 8 rows of a: a stream of packed codes, dequantized in registers by masks and one
             subtraction, for mma.m16n8k16; each code is read once, 16 bytes per lane, and one wave of warps shares K
dequant_dot  over naive, any rows of a: codes become the left operand of wgmma in registers, and a is the right operand
             from shared memory; slower than gemv at few rows, because the stream passes through shared memory
packed       over library, on a CPU: library's call for few rows; for many rows a block of channels at a time becomes
             bf16, stays in L2, and oneDNN multiplies and scales it; library reads the codes again for every four rows
native       over packed, on a CPU, in C++: codes in panels that every matmul reads once, in order; they become fp32 as
             they are loaded

Ideas that were tried, predicted or not built: docs/notes/gemm_w8a16.md. Four and eight bits share `gemv`
(kernels/lib/stream.cu) and `dequant_dot` (kernels/lib/dequant_dot.py).
"""

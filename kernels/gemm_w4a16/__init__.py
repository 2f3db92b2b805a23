"""Kernels of the op gemm_w4a16: `C = A @ W + bias` with bf16 activations and 4-bit weights.

`W = (code - zero) * scale`.  32, 64 or 128 weights along K form a group with one scale.  "over x" says what changes
compared with the kernel `x`.  A "peer" is another library's kernel, for comparison.

naive        the weight unpacked and dequantized to bf16 in memory, and torch's product: ten steps, 41 bytes of traffic
             per 4-bit weight
library      torch's _weight_int4pack_mm (tinygemm on CUDA); scales and offsets are interleaved at load
gemv         over naive, for up to 8 rows of A (up to 4 in groups of 32): reads each packed code once, 16 bytes per
             lane; masks and one subtraction dequantize the codes in registers for mma.m16n8k16; all warps run in one
             wave, and K is split over them
dequant_dot  over naive, for any rows of A: codes are dequantized in registers and become the left operand of wgmma; A
             is the right operand, in shared memory. Slower than gemv for few rows, because the codes pass through
             shared memory. Slower in groups of 32, because their rows of 16 bytes are half of what L2 sends
native       over naive, on a CPU: panels of 32 columns; one instruction turns the codes of two neighbours along K into
             bf16 for 16 columns (AVX512-BF16), else codes become fp32; a group's fp32 sum is scaled once
marlin       peer: Marlin's fp16 kernel, symmetric groups of 128; its time includes conversions

Ideas that were tried, predicted or not built: docs/notes/gemm_w4a16.md. gemm_w4a16 and gemm_w8a16 share the code of
`gemv` (kernels/lib/stream.cu) and of `dequant_dot` (kernels/lib/dequant_dot.py).
"""

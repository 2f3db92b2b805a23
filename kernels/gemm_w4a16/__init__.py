"""Kernels of the op gemm_w4a16: `C = A @ W + bias` with bf16 activations and 4-bit weights.

`W = (code - zero) * scale`.  32, 64 or 128 weights along K form a group with one scale.  "over x" says what changes
compared with the kernel `x`.  A "peer" is another library's kernel, for comparison.

naive        the weight unpacked and dequantized to bf16 in memory, and torch's product: ten steps, 41 bytes of traffic
             per 4-bit weight
library      torch's _weight_int4pack_mm (tinygemm on CUDA); scales and offsets are interleaved at load
gemv         over naive, for up to 8 rows of A (up to 4 rows with groups of 32): reads each packed code once, 16 bytes
             per lane. Masks and one subtraction dequantize the codes in registers, for mma.m16n8k16. K is split over
             warps, so that all of them run in one wave
dequant_dot  over naive, for any rows of A: codes are dequantized in registers, as the left operand of wgmma. A, in
             shared memory, is the right operand. With few rows it is slower than gemv, because codes pass through
             shared memory. Groups of 32 are slower: a row of a group has 16 bytes, and L2 sends at least 32 bytes
marlin       peer: Marlin's fp16 kernel, symmetric groups of 128; its time includes conversions

Ideas that were tried, predicted or not built: docs/notes/gemm_w4a16.md. gemm_w4a16 and gemm_w8a16 share the code of
`gemv` (kernels/lib/stream.cu) and of `dequant_dot` (kernels/lib/dequant_dot.py).
"""

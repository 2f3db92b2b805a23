"""Kernels of the op gemm_gguf: `C = A @ W^T + bias` with bf16 activations and a weight in a format of GGUF.

`W = scale * code - minimum`, with codes of 4 or 8 bits.  16 or 32 weights along K share a scale.  "over x" says what
changes compared with the kernel `x`.

naive        the weight dequantized to bf16 in memory, and torch's product
dequant_dot  over naive: codes become bf16 in registers, which is exact; the sums of a group are scaled in fp32
native       over naive, on a CPU: panels of 32 columns, read once, in order.  With AVX512-VNNI, codes are multiplied as
             they are stored: an activation becomes an integer of 16 bits, relative to the largest of its group, and
             vpdpbusd multiplies 64 codes by one of its two bytes.  Else codes become fp32 values in registers.  If A
             has more than 16 rows, they share a panel that is dequantized once

llama.cpp rounds activations to 8 bits instead (its Q8_0 and Q8_K), which needs one vpdpbusd for 64 codes, and 2**-8 of
the largest activation of a group is lost.  With 16 bits, 2**-16 is lost.
"""

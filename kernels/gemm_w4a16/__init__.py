"""gemm_w4a16: C = A W + bias; bf16 activations, W = (code - zero) scale in four bits, groups of 32, 64 or 128.

naive        the weight unpacked and dequantized to bf16 in memory, and torch's product: nine steps, 41 bytes of traffic
             per weight of half a byte
library      torch's _weight_int4pack_mm (tinygemm on CUDA); scales and offsets are interleaved at load
gemv         over naive, up to 8 rows of a (4 in groups of 32): a stream of packed codes, dequantized in registers by
             masks and one subtraction, for mma.m16n8k16; each code is read once, 16 bytes per lane, and one wave of
             warps shares K
dequant_dot  over naive, any rows of a: codes become the left operand of wgmma in registers, and a is the right operand
             from shared memory; slower than gemv at few rows, because the stream passes through shared memory, and in
             groups of 32, whose rows of 16 bytes are half of what L2 sends
marlin       peer: Marlin's fp16 kernel, symmetric groups of 128; its time includes conversions

gemv and dequant_dot read one packed form, so a model keeps one copy.  Both multiply code - zero exactly, and scale fp32
sums; naive, library and marlin round each weight once.  Their times are unmeasured on a GPU.  Predicted by `rooflab
explain` at N=K=8192 in groups of 128: gemv at M=1 13.2 us on an H100 SXM (bound 10.3) and 9.8 us on an H200 (7.2);
dequant_dot on an H100 16.6 us at M=16 (10.5) and 20.1 us at M=64 (11.0), with K split in both.
"""

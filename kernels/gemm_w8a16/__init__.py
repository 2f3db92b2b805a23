"""gemm_w8a16: C = A (scale B) + bias, activations in bf16, a weight of int8 codes with a scale for each column.

naive        the weight dequantised to bf16 in memory, and torch's product: 21 bytes moved for each weight of one
library      torch._weight_int8pack_mm: on a CPU codes become fp32 in registers; on CUDA one thread an output, in fp32
gemv         over naive, up to 8 rows of a: a stream of packed codes, dequantised in registers by masks and one
             subtraction, for mma.m16n8k16; each is read once, 16 bytes a lane, and one wave of warps shares K
dequant_dot  over naive, any rows of a: codes become the left operand of wgmma in registers, and a is the right one from
             shared memory; loses to gemv at few rows, where stages of shared memory stand in the stream's way
packed       over library, on a CPU: library's call for few rows; for many, codes become bf16 a block of channels at a
             time, which stays in L2, and oneDNN multiplies and scales it: library reads them for every four rows

gemv and dequant_dot read one packed form, so that a model keeps one.  Both multiply codes exactly, and scale fp32 sums.
Their times are unmeasured on a GPU.  Predicted by `rooflab explain` for gemv at M=1, N=K=8192: 24.0 us on an H100 SXM
(bound 20.0), 17.3 us on an H200 (14.0).
"""

"""gemm: C = A B + bias.

naive        one Triton program per 16 x 64 tile; one k at a time, an outer product in fp32 FMAs; no tensor cores
library      torch.mm and torch.addmm: cuBLAS on CUDA, oneDNN or MKL on the CPU
tensor_core  over naive: tl.dot on tiles of K, in groups of row panels that share B in L2; the FLOP ceiling moves from
             the FMA units to the tensor cores, except in fp32, which is never rounded to TF32
packed       over library, on the CPU: the weight is reordered once at load into oneDNN's blocks, which the library call
             does again, or does without, at every call
"""

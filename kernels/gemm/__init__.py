"""Kernels of the op gemm: `C = A @ B + bias + residual`.  "over x" says what changes compared with the kernel `x`.  A
"peer" is another library's kernel, for comparison.

naive             one Triton program per 16 x 64 tile; one k at a time, in fp32 FMAs; no tensor cores
library           torch.mm and torch.addmm: cuBLAS on CUDA, oneDNN or MKL on the CPU
one_thread        as simple as naive, in CUDA C++: one output per thread and two loads per FMA
shared_tiles      over one_thread: tiles in shared memory without bank conflicts, 8 x 8 outputs per thread; exact fp32
tensor_core       over naive: tl.dot on tiles of K; consecutive CTAs share rows and columns in L2
pipelined         over tensor_core: the next tiles of K are loaded (cp.async) while the current tiles are multiplied
tma               over pipelined: the tensor memory accelerator loads tiles, and threads compute no addresses
persistent        over tma: one CTA per SM computes several tiles, and the next tile's loads overlap the epilogue
warp_specialized  over persistent: one warpgroup only loads and two only multiply
cooperative       over warp_specialized, in Gluon: a product is always in flight, and no warp waits for a store
multicast         over cooperative, in CUDA C++: two CTAs of a cluster load shared columns of B once
split_k           over pipelined, for few rows of A: K is split over CTAs; a second launch adds the sums in order
stream_k          over split_k: every SM gets the same number of steps along K, so it may compute a part of a tile
gemv              over naive, for one to four rows of A: reads the weight by 16-byte loads, multiplies by FMAs, and
                  adds the sums within a warp, then a CTA, then a cluster
swap_ab           over split_k: computes C^T = W A^T, so the batch is the N of wgmma, 8 to 64
cublas_reduced    peer: cuBLAS in torch's default mode, which may add the partial sums of a split K in 16 bits
quack             peer: QuACK's gemm for Hopper in CuTe DSL, if it is installed
packed            over library, on the CPU: the weight is reordered once at load into oneDNN's blocks
native            over packed, on a CPU, in C++: the weight in panels of 32 columns, read at the memory bandwidth if A
                  has one row

No kernel here was measured on a GPU.  docs/notes/gemm.md says when each kernel is predicted to win, and what it needs.
gemm and gemm_fp8 share the source of `multicast`: kernels/lib/multicast.cu.
"""

"""gemm: C = A B + bias + residual.

naive        one Triton program per 16 x 64 tile; one k at a time, an outer product in fp32 FMAs; no tensor cores
library      torch.mm and torch.addmm: cuBLAS on CUDA, oneDNN or MKL on the CPU
one_thread   next to naive, in CUDA C++: one output per thread and two loads per FMA, where naive keeps a tile in
             registers; predicted slower than naive, most with a transposed weight. Unmeasured on a GPU
shared_tiles
             over one_thread: tiles in shared memory without bank conflicts, 8 x 8 outputs per thread; FMAs are three
             quarters of the loop. For exact fp32; unmeasured on a GPU
tensor_core  over naive: tl.dot on tiles of K; groups of row panels share B in L2. The limit moves from the FMA units to
             the tensor cores, except in fp32, which is rounded to TF32 only if `precision` allows it
pipelined    over tensor_core: the same code with two or more tiles of K in flight (cp.async) during a product, so a
             product no longer waits for memory. Unmeasured on a GPU
tma          over pipelined: the tensor memory accelerator (TMA) loads tiles by tensor maps that the host makes, and
             threads compute no addresses; predicted faster with large tiles, slower for short launches, because each
             map costs the host a driver call. Needs addresses and row strides of whole 16 bytes; unmeasured on a GPU
persistent   over tma: one CTA per SM walks over tiles, the loads of the next tile overlap the epilogue, and TMA stores
             the result in parts; predicted faster with several tiles per SM, equal with one. Unmeasured on a GPU
warp_specialized
             over persistent: one warpgroup only loads and two only multiply, with more registers (setmaxnreg); a
             tile's whole result waits in shared memory, which costs one stage of the pipeline. Unmeasured on a GPU
cooperative  over warp_specialized, in Gluon: each consumer always has a product in flight and its own accumulator, TMA
             loads the residual, and a store is awaited only when its memory is needed again; predicted to gain most at
             small K, and nothing with less than one tile per SM. Can give each consumer tiles of its own, in turn
             (ping-pong), which needs a third more from L2. Unmeasured on a GPU
multicast    over cooperative, in CUDA C++: a cluster of two CTAs loads the columns of b that both need once, and TMA
             writes them into the memory of both; 32 bytes from L2 per clock and SM instead of 48. Predicted equal where
             L2 gives 48, and faster where it gives less. 16 bits; unmeasured on a GPU
split_k      over pipelined, for few rows of a: K is split over CTAs until one wave fills the SMs, and a second launch
             adds the partial sums in order; no atomics, no counters. Predicted slower if the tiles alone fill the SMs
             (then it is one launch with deeper loads), or if the weight is so small that the second launch shows
stream_k     over split_k: the steps of all tiles in one sequence, cut into one equal part per SM, and a second launch
             for the tiles that were cut. Predicted slower where split_k's CTAs are balanced: its loop finds the tile
             of a step by division, and memory-bound SMs need no equal shares
gemv         over naive, for one to four rows of a: no tiles; 16-byte loads that bypass L1, eight in flight per thread,
             FMAs, sums in a warp, a CTA and a cluster; a dependent launch (kernels/_pdl.py) asks for weights before it
             waits for the kernel before
swap_ab      over split_k: C^T = W A^T, so the batch is the N of wgmma, 8 to 64; a warpgroup loads the weight by
             cp.async, a warp loads a, and others multiply; the shares of K are a cluster, whose sums meet in shared
             memory in the same launch. A dependent launch fills the ring with the weight before a is there.
             Needs a transposed weight with rows at 16 bytes; beyond 64 rows of a it reads the weight again. split_k,
             stream_k, gemv and swap_ab are unmeasured on a GPU
cublas_reduced
             peer: library in torch's own math mode, which may add the parts of a split K in 16 bits
quack        peer: QuACK's gemm for Hopper in CuTe DSL, if it is installed; 16 bits, addresses and strides for TMA
packed       over library, on the CPU: the weight is reordered once at load into oneDNN's blocks; the library call
             reorders it in every call, or does without
native       over packed, on a CPU, in C++: panels of 32 columns, which one row streams at the rate of memory; a 16-bit
             weight becomes fp32, so with many rows packed is faster there
"""

"""gemm: C = A B + bias + residual.

naive        one Triton program per 16 x 64 tile; one k at a time, an outer product in fp32 FMAs; no tensor cores
library      torch.mm and torch.addmm: cuBLAS on CUDA, oneDNN or MKL on the CPU
one_thread   beside naive, in CUDA C++: one output a thread, and two loads for every FMA, where naive has a tile in
             registers; predicted to lose to it, most with a transposed weight. Unmeasured on a GPU
shared_tiles
             over one_thread: tiles in shared memory, free of bank conflicts, and 8 x 8 outputs a thread; FMAs are three
             quarters of its loop. For fp32 that is not to be rounded; unmeasured on a GPU
tensor_core  over naive: tl.dot on tiles of K, in groups of row panels that share B in L2; the FLOP ceiling moves from
             the FMA units to the tensor cores, except in fp32, which is rounded to TF32 only where `precision` says so
pipelined    over tensor_core: the same code, with two or more tiles of K in flight (cp.async) during a product; a
             product no longer waits for memory. Unmeasured on a GPU
tma          over pipelined: the tensor memory accelerator fetches tiles by maps that the host makes, and threads
             compute no addresses; predicted to win with large tiles and to lose where a launch is short, for each map
             costs the host a driver call. Addresses and row strides of whole 16 bytes only; unmeasured on a GPU
persistent   over tma: one CTA for each SM walks over tiles, loads of the next tile run under the epilogue, and the
             result leaves by TMA in parts; predicted to win with several tiles for each SM and to do nothing with one.
             Unmeasured on a GPU
warp_specialized
             over persistent: a warpgroup only loads and two only multiply, registers moved to them (setmaxnreg); the
             tile's result waits whole in shared memory, so one stage fewer is loaded ahead. Unmeasured on a GPU
cooperative  over warp_specialized, in Gluon: each consumer has a product in flight throughout and an accumulator of its
             own, a residual comes by TMA, and stores are waited for only where their memory is needed; predicted to
             win most at small K, and to do nothing with less than a tile for each SM. Unmeasured on a GPU
split_k      over pipelined, for few rows of a: K is split over CTAs until one wave fills the SMs, and a second launch
             adds the shares up in order; no atomics, no counters. Predicted to lose where the tiles fill the SMs by
             themselves (it then is one launch with deeper loads) and on weights so small that the second launch shows
stream_k     over split_k: the steps of all tiles in one row, cut into one equal part for each SM, and a second launch
             for the tiles that were cut. Predicted to lose where split_k's CTAs come out even: its loop works out a
             step's tile by division, and memory-bound SMs need no equal shares
gemv         over naive, for one to four rows of a: no tile at all; 16-byte loads past L1, eight in flight a thread,
             FMAs, sums in a warp, a CTA and a cluster
swap_ab      over split_k: C^T = W A^T, so that the batch is wgmma's 8 to 64 columns; a warpgroup loads by cp.async and
             others multiply; shares of K are a cluster, whose sums meet in shared memory, in the same launch.
             Transposed weights with rows at 16 bytes only; beyond 64 rows of a it reads the weight again. The four are
             unmeasured on a GPU
quack        peer: QuACK's gemm for Hopper in CuTe DSL, where it is installed; 16 bits, addresses and strides for TMA
packed       over library, on the CPU: the weight is reordered once at load into oneDNN's blocks, which the library call
             does again, or does without, at every call
"""

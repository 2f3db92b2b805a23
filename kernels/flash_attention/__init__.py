"""Attention over dense keys and values.  The ladder, and beside it what it is measured against:

naive              torch steps: heads expanded, (B, H, T, S) scores in fp32 in memory, softmax, second product
library            torch's scaled_dot_product_attention; its is_causal is top-left, so T < S takes the lower-right bias;
                   fp8 it dequantises to bf16 in memory first, as torch has no attention in fp8
online             over naive, Triton; one pass over the keys with a running maximum and sum, so that no score leaves
                   the chip
masked_tiles       over online: the tiles that the diagonal, a window or an end cuts have loops of their own, and the
                   loop over all others has no mask; a score enters its exponential by one multiply-add.  In bf16 at
                   llama3_8b that loop is 355 instructions for 128 by 64 scores where online's is 557.  Every option
                   and head_dim.  A loss in registers: 172 a thread for 158
tma                over masked_tiles: q, k and v through tensor maps, by one thread.  The loop is 337 instructions at
                   the same tile and the kernel 138 registers, so that 128 by 128 scores fit (191).  At 128 registers
                   two CTAs would fit an SM, but held to them (maxnreg) the assembler waits for each wgmma by itself:
                   not done.  No fp32
packed_gqa         over tma: the query heads of a group share a tile's rows, for queries shorter than a tile.  16 of
                   them in groups of 4 fill 64 rows where 4 tiles of 128 were an eighth full, with a quarter of the
                   loads of keys.  A quarter of the CTAs too, and nothing is split over the keys: a prediction is that
                   it loses to tma where its tiles leave most SMs empty.  233 registers for 191, as rows' offsets wait
persistent         over tma: as many CTAs as the SMs hold go from tile to tile, the longest first, the heads of a
                   section that fits L2 before the next.  229 registers for 191, none spilled in the loops, and each
                   tile still fills its pipeline anew: a prediction is that it wins under a causal mask by its order
                   and loses a little without one
fp8                over tma: e4m3 with a scale of each head.  64 rows by 128 keys take 8 wgmma for tma's 16 where the
                   keys of v are contiguous; where they are not, v goes through registers to fp16, and 4 and 8 of fp16
                   remain.  Half of tma's shared memory, so that two CTAs of 64 rows fit an SM (179 registers and 224).
                   Predictions, uncalibrated, for 8k causal, 16 heads on 16: 316 us and 396 us, tma 623 us, and most is
                   that pair of CTAs.  A loss in accuracy: weights of 4 bits where v's keys are contiguous
ping_pong          over online, Gluon: a producer warp and two consumer warpgroups in turn, so that the exponentials of
                   one run under the products of the other; CTAs that stay, and the order of persistent
flash_attention_3  a peer: the authors' CUDA of FlashAttention-3 (Shah et al., arXiv 2407.08608), where it is installed
flashinfer         a peer: FlashInfer's single and batch prefill (Ye et al., arXiv 2501.01005), where it is installed
sdpa_cudnn         a peer: torch's call, held to cuDNN's kernel
sdpa_efficient     a peer: torch's call, held to its memory-efficient backend, which groups no heads
sdpa_flash         a peer: torch's call, held to its build of FlashAttention-2

Registers and instructions are counted in the code that Triton 3.7.1 compiles for sm_90a (B=1, T=S=2048, 32 heads on 8,
D=128, causal); nothing here was timed on a GPU.
"""

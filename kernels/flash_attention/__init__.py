"""flash_attention: attention over dense keys and values.

naive              torch steps: heads expanded, (B, H, T, S) scores in fp32 in memory, softmax, second product
library            torch's scaled_dot_product_attention; its is_causal is top-left, so T < S takes the lower-right bias;
                   fp8 is dequantized to bf16 in memory first, because torch has no attention in fp8
online             over naive, Triton; one pass over the keys with a running maximum and sum, so scores stay on the chip
masked_tiles       over online: tiles cut by the diagonal, a window or an end have their own loops, and the loop over
                   the other tiles has no mask; one multiply-add turns a score into an exponent.  In bf16 at llama3_8b
                   that loop has 355 instructions for 128 x 64 scores, online's 557.  Takes every option and head_dim.
                   Costs registers: 172 per thread instead of 158
tma                over masked_tiles: one thread loads q, k and v by tensor maps.  The loop has 337 instructions for the
                   same tile and the kernel 138 registers, so 128 x 128 scores fit (191).  With 128 registers two CTAs
                   would fit on an SM, but held to them (maxnreg) the assembler waits for each wgmma by itself: not
                   done.  No fp32
packed_gqa         over tma: the query heads of a group share a tile's rows, for queries shorter than a tile.  16
                   queries in groups of 4 fill 64 rows; 4 tiles of 128 were an eighth full.  A quarter of the loads of
                   keys, but also of the CTAs, and keys are not split: predicted slower than tma if its tiles leave most
                   SMs empty.  233 registers instead of 191, because the rows' offsets are kept
persistent         over tma: as many CTAs as fit on the SMs take tile after tile, the longest first, and all heads of a
                   section that fits in L2 before the next.  229 registers instead of 191, no spills in the loops, but
                   each tile fills its pipeline again: predicted faster under a causal mask by its order, and a little
                   slower without one
fp8                over tma: e4m3 with one scale per head.  64 rows by 128 keys take 8 wgmma instead of 16 if v's keys
                   are contiguous; otherwise v goes through registers to fp16, which takes 4 fp8 and 8 fp16 wgmma.
                   Half of tma's shared memory, so two CTAs of 64 rows fit on an SM (179 and 224 registers).
                   Predictions, not calibrated, for 8k causal, 16 heads on 16: 316 us and 396 us, tma 623 us, mostly due
                   to the two CTAs.  Costs accuracy: weights have 4 bits if v's keys are contiguous
ping_pong          over online, Gluon: a producer warp and two consumer warpgroups that take turns, so the exponentials
                   of one run under the products of the other; persistent CTAs in the order of persistent.  With a
                   head_dim of 64, where exponentials are the bound, long inputs take three consumers without turns:
                   424 instructions a step, not 470; predicted for 8k, 32 heads: 690 us, not 959, causal 366, not 490
flash_attention_3  peer: the authors' CUDA code of FlashAttention-3 (Shah et al., arXiv 2407.08608), if installed
flashinfer         peer: FlashInfer's single and batch prefill (Ye et al., arXiv 2501.01005), if installed
sdpa_cudnn         peer: torch's call with cuDNN's kernel
sdpa_efficient     peer: torch's call with its memory-efficient backend, which does not group heads
sdpa_flash         peer: torch's call with its build of FlashAttention-2

Registers and instructions are those of Triton 3.7.1's code for sm_90a (B=1, T=S=2048, 32 heads on 8, D=128, causal);
no kernel here was timed on a GPU.
"""

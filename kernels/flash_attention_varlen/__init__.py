"""Kernels of the op flash_attention_varlen: attention over sequences of different lengths, without padding.  "over x"
says what changes compared with the kernel `x`.  A "peer" is another library's kernel, for comparison.

naive              torch steps, a Python loop over sequences, with all scores in memory
library            torch's FlashAttention-2 with offsets on CUDA in 16 bits; elsewhere scaled_dot_product_attention,
                   one sequence at a time
online             over naive, Triton: one launch for all sequences; the tiles with the most causal keys come first; a
                   tile has a mask only if a diagonal, a window or an end crosses it
native             over library, on a CPU, in C++: tiles in cache and registers, one call for all sequences; skips tiles
                   that the mask hides completely
flash_attention_3  peer: FlashAttention-3 with offsets (Shah et al., arXiv 2407.08608), if installed
flashinfer         peer: FlashInfer's prefill of ragged sequences (Ye et al., arXiv 2501.01005), if installed; the
                   benchmark does not measure its plan
torch_varlen       peer: torch's varlen_attn, which runs FlashAttention-2 or a kernel that the caller activated
"""

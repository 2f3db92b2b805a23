"""Kernels of the op embedding: copies one row of the table per token.  "over naive" means: compared with `naive`.

naive       one Triton program per token; each thread moves one element at a time
library     torch.nn.functional.embedding
vectorized  over naive: each thread moves 16 bytes at a time, with four rows in flight per program, because the bytes
            in flight limit a gather
native      over library: C++ for the CPU, one copy per row; it never calls torch, so a decode step can be recorded
"""

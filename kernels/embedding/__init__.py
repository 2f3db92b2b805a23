"""Kernels of the op embedding: copies one row of the table per token.  "over naive" means: compared with `naive`.

naive       one Triton program per token; each thread moves one element at a time
library     torch.nn.functional.embedding
vectorized  over naive: 16 bytes per thread at a time and four rows in flight per program, because the bytes in flight
            limit a gather
native      over library: C++ for the CPU, one copy per row; it never calls torch, so a decode step that consists of
            such kernels can be recorded and repeated
"""

"""embedding: one row of the table per token.

naive       one Triton program per token; each thread moves one element at a time
library     torch.nn.functional.embedding
vectorized  over naive: 16 bytes a thread at a time and four rows in flight in a program, because a gather is bound by
            the bytes that are under way
"""

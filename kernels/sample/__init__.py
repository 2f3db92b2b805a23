"""Kernels of the op sample: draws a token per row of logits.

naive       torch steps: a stable sort of every row, cumulative mass, Philox random numbers, argmax
library     the same sort, then torch.multinomial, which has a random stream of its own
prefilter   on the CPU: a greedy row is one argmax; in other rows a threshold leaves few tokens to sort
native      over prefilter: finds the largest logit of a greedy row by one pass of C++
bisect      Triton, one program per row: bisection applies top-k and top-p without a sort
cluster     CUDA C++: the shared memory of a cluster of CTAs holds a row, so memory is read once; the launch also edits
            logits and computes log-probabilities
flashinfer  FlashInfer, if it is installed: rejection instead of a sort; it has a random stream of its own
"""

"""Drawing a token per row; torch has no call for it, because torch.multinomial draws from torch's own stream.

naive       torch steps: a stable sort of every row, cumulative mass, Philox over the vocabulary, argmax
prefilter   CPU; greedy rows are one argmax, and a threshold leaves few tokens to sort and to race
bisect      Triton, one program a row; no sort: bisection on order-preserving keys, four halvings a pass, finds the cut
            of top-k and top-p, and min-p and the race are fused into the last pass
"""

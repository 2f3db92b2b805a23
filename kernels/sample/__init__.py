"""sample: draws a token per row.  torch has no call for it: torch.multinomial uses torch's own random stream.

naive       torch steps: a stable sort of every row, cumulative mass, Philox over the vocabulary, argmax
prefilter   on the CPU: a greedy row is one argmax; in other rows a threshold leaves few tokens to sort and to race
bisect      Triton, one program per row, no sort: bisection on order-preserving keys, four halvings per pass, finds the
            cut of top-k and top-p; the last pass also applies min-p and runs the race
"""

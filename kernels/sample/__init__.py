"""sample: draws a token per row.

naive       torch steps: a stable sort of every row, cumulative mass, Philox over the vocabulary, argmax
library     the same sort and cuts, and torch.multinomial, which draws from a random stream of its own
prefilter   on the CPU: a greedy row is one argmax; in other rows a threshold leaves few tokens to sort and to draw from
native      over prefilter: the largest logit of a greedy row by one pass of C++
bisect      Triton, one program per row, no sort: bisection on integer keys in logit order finds the cut of top-k and
            top-p, with four halvings in each pass over the row; the last pass also applies min-p and draws; torch calls
            edit logits
cluster     CUDA C++: a row lies in the shared memory of a cluster of CTAs and is read from memory once; the launch also
            edits logits, applies the mask and computes log-probabilities
flashinfer  FlashInfer, if it is installed: rejection instead of a sort; it draws from a stream of its own
"""

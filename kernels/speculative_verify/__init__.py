"""speculative_verify: accepts the tokens of a draft, and draws the token after them.

naive   torch steps over every row of target and draft probabilities: ratios, residual, and the draw as in `sample`
fused   Triton, one program per sequence: the drafts' ratios first, and then only the row that decides the last token
"""

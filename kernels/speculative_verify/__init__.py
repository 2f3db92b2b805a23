"""speculative_verify: accepts the tokens of a draft, and draws the token after them.

naive   torch steps over every row of both laws: ratios, residual, and the race of `sample`
fused   Triton, one program per sequence: the drafts' ratios first, and then only the row that decides
"""

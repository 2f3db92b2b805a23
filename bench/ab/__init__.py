"""Runs A/B comparisons with a verdict that can block a merge.  Pairs of fresh processes measure the two sides.

`compare` runs an A/B comparison of any two functions.  `rooflab ab` compares two kernels, revisions or record files.
"""

from rooflab.bench.ab.compare import compare

__all__ = ["compare"]

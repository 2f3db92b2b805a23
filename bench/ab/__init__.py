"""A/B comparisons whose verdict can gate a merge.  Pairs of fresh processes measure the two sides.

`compare` runs an A/B of any two functions.  `rooflab ab` compares two kernels, two revisions or two record files.
"""

from rooflab.bench.ab.compare import compare

__all__ = ["compare"]

"""A/B verdicts that can gate a merge: fresh processes in pairs, on two kernels, two revisions or two record files.

`compare` runs an A/B of any two functions; `rooflab ab` compares kernels, revisions and record files.
"""

from rooflab.bench.ab.compare import compare

__all__ = ["compare"]

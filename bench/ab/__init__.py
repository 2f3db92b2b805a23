"""A/B verdicts that can gate a merge: fresh processes in pairs, on two kernels, two revisions or two record files.

`compare` does it for any two functions; `rooflab ab` for the rest.
"""

from rooflab.bench.ab.compare import compare

__all__ = ["compare"]

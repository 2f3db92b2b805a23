"""Contains the studies, one file for each.  `run(lab)` returns the claim, the measured rows and the verdict."""

STUDIES = ("kv-cache", "batching", "paging", "prefix", "chunking", "quantisation")
REMOVED = ("intensity", "fusion", "launch-bound", "batch-invariance")
"""Studies of earlier commits that were removed.  Their last results are in results/cpu/studies."""

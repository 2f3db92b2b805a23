"""One file for each study: `run(lab)` returns its claim, its rows and its verdict."""

STUDIES = ("kv-cache", "batching", "paging", "prefix", "chunking", "quantisation")
REMOVED = ("intensity", "fusion", "launch-bound", "batch-invariance")
"""Studies of earlier commits; their last results are in results/cpu/studies."""

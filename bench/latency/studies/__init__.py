"""One file for each study: `run(lab)` returns what came out."""

STUDIES = (
    "kv-cache",
    "intensity",
    "batching",
    "paging",
    "prefix",
    "chunking",
    "fusion",
    "quantisation",
    "launch-bound",
    "batch-invariance",
)

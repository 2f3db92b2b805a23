"""Contains the studies, one file each.  A study's `run(lab)` tests a claim and returns measured rows and a verdict."""

STUDIES = ("kv-cache", "batching", "paging", "prefix", "chunking", "quantisation")

"""Facts from compiled code, without a GPU: loops, instruction counts, widths, occupancy, options without effect.

`bench/compile/static.py` compiles kernels.  The other files read compiled code, store it, and compare two revisions.
"""

"""Facts read from compiled code with no GPU: loops, instruction counts, widths, occupancy, options without effect.

`bench/compile/static.py` compiles.  The other files read the compiled code, store it, and compare two revisions.
"""

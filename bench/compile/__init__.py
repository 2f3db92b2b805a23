"""Reads facts from compiled code without a GPU: loops, instruction counts, load widths, occupancy, ineffective options.

`bench/compile/static.py` compiles kernels.  The other files read compiled code, store it, and compare two revisions.
"""

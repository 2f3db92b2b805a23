"""What compiled code says with no GPU: loops, instruction counts, widths, occupancy, options that took no effect.

`bench/compile/static.py` compiles; the files here read what came out, keep it, and compare it with another revision's.
"""

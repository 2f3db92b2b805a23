"""Predicts times of kernels from compiled code and the roofline model alone, without a GPU and without measurements.

`chip.py` models a Hopper SM, and `work.py` the work of a launch.  `model.py` adds up the parts of a time, and
`explain.py` shows them.  `predictions.py` predicts registered kernels, and `public.py` has the errors for public ones.
`ncu.py` runs Nsight Compute.
"""

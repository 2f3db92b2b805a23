"""Predicts times of kernels from compiled code and the roofline model alone, without a GPU and without measurements.

`chip.py` models a Hopper SM, and `work.py` the work of a launch.  `model.py` adds up the parts of a time, and
`explain.py` shows them.  `predictions.py` predicts registered kernels.  `public.py` compares predictions with published
times of public kernels.  `ncu.py` runs Nsight Compute.
"""

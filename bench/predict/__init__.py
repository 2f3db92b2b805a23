"""Predicts times of kernels from compiled code and the roofline model alone, without a GPU and without measurements.

`chip.py` has Hopper's rates and latencies, and simulates the code of a group of warps.  `work.py` computes the work of
a launch.  `model.py` adds up the parts of a time.  `predictions.py` predicts registered kernels.  `explain.py` shows
the parts.  `public.py` has the prediction errors for public kernels.  `ncu.py` runs Nsight Compute for one call.
"""

"""Predicts times from compiled code and the roofline alone, without a GPU and without measurements.

`chip.py` has Hopper's rates and latencies, and walks the code of a role.  `work.py` says what a launch does.
`model.py` adds up the parts of a time.  `predictions.py` predicts registered kernels.  `explain.py` shows the parts.
`public.py` has the error on public kernels.  `ncu.py` runs Nsight Compute over one call.
"""

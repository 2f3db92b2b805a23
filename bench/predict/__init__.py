"""Predicted times, from compiled code and the roofline alone: no GPU, no measurement.

`chip.py` has Hopper's rates and latencies and walks a role through its code, `work.py` says what a launch does,
`model.py` adds the parts up, `cases.py` does so for registered kernels, `explain.py` splits a time into parts, and
`calibration.py` fits the whole to measured records.  `ncu.py` runs Nsight Compute over one call.
"""

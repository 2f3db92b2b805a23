"""Predicted times, from compiled code and the roofline alone: no GPU, no measurement.

`sass.py` reads the code, `chip.py` has Hopper's rates and latencies, `timeline.py` walks a CTA through its code,
`work.py` says what a launch does, `model.py` adds the parts up, `cases.py` does so for registered kernels, and
`calibration.py` fits the whole to measured records.
"""

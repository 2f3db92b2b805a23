"""Kernels (`measure.py`), and the engine (`engine_run.py`), checked, timed, placed under the roofline, as records."""

"""Timing: the docstring of `timing.time_functions` is the protocol; `reading.py` says which readings are possible."""

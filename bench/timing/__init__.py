"""How a time is read: the docstring of `timing.time_functions` is the protocol; `reading.py` says what can be true."""

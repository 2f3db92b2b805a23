"""How a time is read. The docstring of `timing.time_functions` is the protocol."""

"""Kernels, cases and schemes by name (`selection.py`), and a kernel on a case as a function to call (`calls.py`)."""

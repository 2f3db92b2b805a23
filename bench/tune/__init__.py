"""Searches a kernel's configs (`tune.py`), and finds the fastest kernel for each number of rows (`choose.py`)."""

"""Searches the best config of a kernel (`tune.py`), and the fastest kernel for each number of rows (`choose.py`)."""

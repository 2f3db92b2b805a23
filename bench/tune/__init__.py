"""Searches a kernel's configs (`tune.py`), and writes the fastest kernel of each bucket to a file (`choose.py`)."""

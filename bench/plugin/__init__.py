"""Contains the pytest plugin.  Every pytest run loads `plugin.py`; it imports more modules only for benchmarks."""

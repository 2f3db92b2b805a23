"""Contains the pytest plugin.  Every pytest run loads `plugin.py`, which imports other modules only for benchmarks."""

"""The pytest plugin.  Every pytest run loads `plugin.py`, which imports the other modules only for a benchmark."""

"""The pytest plugin.  Every pytest run loads `plugin.py`.  `plugin.py` imports other modules only for a benchmark."""

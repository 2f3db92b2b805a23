"""Git revisions: their trees (`trees.py`), what differs between two (`changes.py`), and whose they are."""

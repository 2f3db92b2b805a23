"""Git revisions: their trees (`trees.py`), what differs between two (`changes.py`), whose they are (`repository.py`)."""

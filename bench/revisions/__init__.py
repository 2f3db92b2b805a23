"""Git revisions: trees (`trees.py`), differences of two revisions (`changes.py`), repositories (`repository.py`)."""

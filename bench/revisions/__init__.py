"""Git revisions: trees (`trees.py`), the differences of two (`changes.py`), their repository (`repository.py`)."""

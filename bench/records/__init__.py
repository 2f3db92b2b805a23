"""Results as lines of JSON (`record.py`, `files.py`), with machine, software, commit and revision of each result."""

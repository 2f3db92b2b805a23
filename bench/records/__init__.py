"""Results as lines of JSON (`record.py`, `files.py`) with their circumstances: machine, software, commit, revision."""

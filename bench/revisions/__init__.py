"""Works with git revisions: worktrees (`trees.py`), differences (`changes.py`) and repositories (`repository.py`)."""

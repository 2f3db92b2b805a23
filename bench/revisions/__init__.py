"""Works with git revisions: worktrees (`trees.py`), changed files (`changes.py`) and repositories (`repository.py`)."""

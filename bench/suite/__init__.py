"""Implements `rooflab suite`, which runs the most valuable measurements on this machine's GPU within a time budget.

An entry is one command in its own process (`entries.py`, `suite_worker.py`).  `plan.py` orders the entries, and
`runner.py` runs them.  `ahead.py` compiles the kernels of later entries.  `state.py` writes the files in a run's
folder.
"""

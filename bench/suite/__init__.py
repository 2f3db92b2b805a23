"""Implements `rooflab suite`, which runs the useful measurements on this machine's GPU within a time budget.  The most
valuable measurements come first.

`entries.py` defines an entry of the plan: one command in its own process.  `plan.py` orders the entries, and
`runner.py` runs them.  `suite_worker.py` is the process of an entry.  `ahead.py` compiles the kernels of later entries.
`state.py` writes the files in a run's folder.
"""

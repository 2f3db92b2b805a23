"""`rooflab suite`: measures all that is worth measuring on the present card, most valuable first, in a time budget.

`entries.py` defines an entry of the plan, `plan.py` orders the entries, `suite_worker.py` is the process of an entry,
`runner.py` is the loop over the plan, `ahead.py` compiles the kernels that later entries launch, and `state.py` writes
the files of a run's folder.
"""

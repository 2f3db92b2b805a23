"""`rooflab suite`: measures all that is worth measuring on this machine's card in a time budget, most valuable first.

`entries.py` defines an entry of the plan, `plan.py` orders the entries, and `runner.py` is the loop over the plan.
`suite_worker.py` is the process of an entry, `ahead.py` compiles the kernels that later entries launch, and `state.py`
writes the files of a run's folder.
"""

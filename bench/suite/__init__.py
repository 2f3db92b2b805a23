"""`rooflab suite`: everything worth measuring on the present card, most valuable first, within a time budget.

`entries.py` defines an entry of the plan, `plan.py` orders the entries, `bars/` holds one small file for each family of
bars, `tasks.py` and `measures.py` do the work, `worker.py` is the process of an entry, `runner.py` is the loop over the
plan, `ahead.py` compiles what later entries launch, `running.py` notes the kernels that run now, and `state.py` writes
the files of a run's folder.
"""

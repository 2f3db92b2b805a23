"""`rooflab suite`: everything worth measuring on the card at hand, most valuable first, in a box of time.

`entries.py` says what an entry of the plan is, `plan.py` orders them, `bars/` holds one small file for each family of
bars, `tasks.py` and `measures.py` do the work, `worker.py` is the process in which they do it, `runner.py` the loop
over the plan, `running.py` which kernels run right now, and `state.py` what a run leaves in its folder.
"""

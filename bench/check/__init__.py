"""Whether a kernel is right.  `check.py` describes the check, `runs.py` makes its runs, `trial.py` is one run."""

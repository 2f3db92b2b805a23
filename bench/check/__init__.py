"""What makes a kernel right.  `check.py` says what is looked for, `runs.py` makes the runs, `trial.py` is one run."""

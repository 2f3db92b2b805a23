"""Contains checks of the whole engine: `runs.py` records its runs, `doctor.py` shows how it reads a model's files."""

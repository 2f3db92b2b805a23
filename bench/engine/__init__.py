"""Checks of the whole engine: runs as records (`runs.py`), and what is read from a model's files (`doctor.py`)."""

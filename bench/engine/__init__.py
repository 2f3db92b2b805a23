"""Checks the whole engine: its runs as records (`runs.py`), and what it reads from a model's files (`doctor.py`)."""

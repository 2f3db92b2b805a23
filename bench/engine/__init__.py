"""The engine as it answers: runs as records (`runs.py`), and what it understood of a model's files (`doctor.py`)."""

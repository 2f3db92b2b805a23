"""The configs of a kernel searched (`tune.py`), and the fastest kernel of each bucket written down (`choose.py`)."""

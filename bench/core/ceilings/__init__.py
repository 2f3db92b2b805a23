"""The measured ceilings of this machine: `ceilings.py` chooses between them and the data sheet, and caches them."""

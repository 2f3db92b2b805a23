"""What this machine reaches, beside the data sheet: `ceilings.py` says which ceilings count, and keeps them."""

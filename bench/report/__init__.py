"""Makes reports from records: roofline figures (`figures.py`), one HTML page (`page.py`), history and pictures."""

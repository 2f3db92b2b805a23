"""Makes reports from records: roofline figures (`figures.py`), an HTML page (`page.py`), history and pictures."""

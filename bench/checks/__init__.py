"""`rooflab check`: which checks are made, of listed or of drawn cases, and the summary of their results."""

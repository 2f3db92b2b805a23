"""`rooflab check`: which checks are made, of listed or of drawn cases, and what they say together."""

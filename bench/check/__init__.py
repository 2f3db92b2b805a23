"""Whether a kernel is right, and the ways in which a wrong one looks right."""

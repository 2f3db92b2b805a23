"""Who knows what of whom, and which accesses nothing orders."""

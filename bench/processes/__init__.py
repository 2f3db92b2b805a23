"""Child processes: starts, asks, limits and ends them."""

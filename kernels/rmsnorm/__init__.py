"""rmsnorm."""

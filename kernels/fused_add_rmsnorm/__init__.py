"""fused_add_rmsnorm."""

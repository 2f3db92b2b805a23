"""silu_and_mul."""

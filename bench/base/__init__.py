"""What every room may use: the clock, texts and JSON, exit statuses, and what a cubin holds."""

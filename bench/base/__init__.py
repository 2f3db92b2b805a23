"""Helpers that every room may use: the clock, texts and JSON, exit statuses, and the code in a cubin."""

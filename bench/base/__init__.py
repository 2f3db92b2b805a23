"""Helpers that every room may use: the clock, texts and JSON, exit statuses, git, and the code in a cubin."""

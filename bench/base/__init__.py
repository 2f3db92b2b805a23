"""Helpers for all packages of `bench`: the clock, texts and JSON, exit statuses, git, and the code in a cubin."""

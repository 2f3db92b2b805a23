"""Holds helpers for all packages of `bench`: the clock, JSON and Markdown, exit statuses, git, and cubin files."""

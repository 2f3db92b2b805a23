"""Configs searched on the device at hand, and the choice of each bucket's kernel."""

"""Committed records over time: one trend per kernel, case, scheme and machine, and the steps in the trend."""

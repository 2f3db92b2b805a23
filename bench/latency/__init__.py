"""Explains latency by kernels: where the time of a step goes, what another kernel changes, and a simulated load."""

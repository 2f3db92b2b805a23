"""Explains latency by kernels: where a step's time goes, what another kernel would change, and a simulation of load."""

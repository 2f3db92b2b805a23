"""Kernels, cases and schemes by name, and a kernel on a case as a function that can be called."""

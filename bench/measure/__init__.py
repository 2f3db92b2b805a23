"""Kernels, and the engine, measured: checked, timed, placed under the roofline, as records."""

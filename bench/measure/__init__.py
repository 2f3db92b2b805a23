"""Measurements as records: checked and timed kernels under the roofline (`measure.py`)."""

"""Contains tools that explain latency by kernels: times within a step, effects of another kernel, simulated loads."""

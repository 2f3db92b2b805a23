"""The pytest plugin: `--benchmark` and the fixture `kernel_benchmark`."""

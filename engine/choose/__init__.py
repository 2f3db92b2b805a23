"""Which kernels serve the engine: the shapes that a model asks of them, and their times."""

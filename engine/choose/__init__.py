"""Chooses the kernels that serve the engine, by the shapes that a model needs and by measured times."""

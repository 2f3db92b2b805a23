"""Loads a model from its files: the architecture, the weights, the tokenizer, and the model's sampling settings."""

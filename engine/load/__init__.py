"""A model from its files: what a checkpoint says, its weights, its tokenizer, and how it wants its tokens drawn."""

"""Speculation: several tokens per step.  Drafters propose tokens, and one forward of the model verifies all of them."""

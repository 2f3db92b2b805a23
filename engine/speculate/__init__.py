"""Speculation: more than one token a step.  Drafters propose tokens, and one forward of the model verifies them all."""

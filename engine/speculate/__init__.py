"""Implements speculative decoding: drafters propose tokens, and one forward pass of the model verifies all of them."""

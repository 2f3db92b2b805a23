"""PTX as text: parsing, control flow, and what can be said of a kernel without running it."""

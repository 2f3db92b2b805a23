"""Pictures for the documentation, each with the numbers that it is drawn from and where they come from."""

"""Pictures for the documentation, each with the numbers behind it and the source of these numbers."""

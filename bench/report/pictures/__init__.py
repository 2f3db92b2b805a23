"""Makes pictures for the documentation.  Each picture comes with its numbers and their source."""

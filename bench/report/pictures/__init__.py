"""Makes pictures for the documentation.  Each picture shows its numbers and their source."""

"""Pictures for the documentation.  With each picture come its numbers and the source of the numbers."""

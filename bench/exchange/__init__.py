"""Results of other tools as records, and records in the forms that other tools read."""

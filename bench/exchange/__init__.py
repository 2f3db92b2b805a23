"""Imports the results of other tools as records, and exports records in the formats of other tools."""

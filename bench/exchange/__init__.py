"""Imports other tools' results as records, and exports records in the formats of other tools."""

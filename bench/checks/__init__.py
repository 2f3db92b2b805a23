"""The checks of `rooflab check`: their choice, from listed or drawn cases, and the summary of the results."""

"""Chooses the checks of `rooflab check`, from listed or drawn cases, and summarizes the results."""

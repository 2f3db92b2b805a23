"""Shows how kernel times changed over commits.  Each kernel, case, scheme and machine has one trend."""

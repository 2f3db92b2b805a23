"""Results as lines of JSON with their circumstances, and what the circumstances are: machine, software, commit."""

"""The pytest plugin: `plugin.py` is what every pytest run loads, and imports the rest only where a benchmark runs."""

"""One file for each study: `run(lab)` returns what came out."""

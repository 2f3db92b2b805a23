"""Exit statuses of the commands; if several apply, the first.  Those of an A/B are in `rooflab.bench.ab`."""

from __future__ import annotations

EXIT_INCORRECT, EXIT_INVALID, EXIT_UNDECIDED, EXIT_USAGE, EXIT_INTERRUPTED = 11, 13, 12, 2, 130
EXIT_BROKEN = 14
"""A kernel has broken the CUDA context: a fresh process must do the rest."""

"""Runs Rooflab's command line: the entry point of `rooflab` and of `python -m rooflab.bench`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs Rooflab's command line."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as `python -m` does, so that a user's file can import the files beside it
    from rooflab.bench.cli.app import run

    run()


if __name__ == "__main__":
    main()

"""`rooflab` and `python -m rooflab.bench`: runs the command line."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The command line."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as with -m, so that a user's file finds the files beside it
    from rooflab.bench.cli.app import run

    run()


if __name__ == "__main__":
    main()

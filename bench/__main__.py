"""`rooflab` and `python -m rooflab.bench`: runs the command line, with a witness where it judges kernels."""

from __future__ import annotations

import os
import sys

from rooflab.bench.processes.witnessed import PIPE, with_verdict, witness


def main() -> None:
    """The command line.  A command that judges kernels in its own process has a witness."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as with -m, so that a user's file finds the files beside it
    if PIPE not in os.environ and sys.argv[1:2] in (["bench"], ["emulate"]):
        sys.exit(witness([sys.executable, "-m", "rooflab.bench", *sys.argv[1:]], os.environ))
    from rooflab.bench.cli.app import run

    with_verdict(run)


if __name__ == "__main__":
    main()

"""The files of `bench/` whose functions a command enters, from the command line to the record, in this process.

    python results/entered.py bench gemm --kernel native --out /tmp/run

Printed in the order of the first call, with the number of functions entered; code that runs on import is not counted.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rooflab.bench.__main__ import main as rooflab
from rooflab.bench.base.statuses import ExitStatus

BENCH = str(Path(__file__).resolve().parent.parent / "bench") + "/"
ON_IMPORT = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


def entered(words: Sequence[str]) -> dict[str, set[str]]:
    """By file, the functions that `rooflab WORDS` enters."""
    seen: set[CodeType] = set()
    found: dict[str, set[str]] = {}

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen:
            return
        seen.add(code)
        class_body = not code.co_flags & 2  # CO_NEWLOCALS: only functions have it
        if code.co_filename.startswith(BENCH) and code.co_name not in ON_IMPORT and not class_body:
            found.setdefault(code.co_filename.removeprefix(BENCH), set()).add(code.co_qualname)

    sys.argv = ["rooflab", *words]
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        rooflab()
    except SystemExit as ended:
        if ended.code == ExitStatus.USAGE:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="The files of bench/ that a command enters.")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="the command, such as: bench gemm --kernel native")
    files = entered(parser.parse_args().words)
    for name, functions in files.items():
        print(f"{len(functions):4} {name}")
    print(f"{len(files)} files of bench/")


if __name__ == "__main__":
    main()

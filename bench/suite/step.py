"""Runs one step of the suite as a command.  `end` calls the step's function and writes `outcome.json`.

The suite's runner requires only an exit status from the command.  The status is 12 if the step had too little time, and
14 if a broken CUDA context ended it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rooflab.bench.base.plain import plain
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.core import ContextBroken
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.kernels._files import write_whole

OUTCOME_FILE = "outcome.json"
STEP_OPTIONS = ("--out", "{out}", "--seconds", "{seconds}", "--seed", "{seed}")
"""The options that every step gets after its own arguments."""


def parser(about: str) -> argparse.ArgumentParser:
    """Returns a command-line parser with the options that every step of the suite gets."""
    option_parser = argparse.ArgumentParser(description=about)
    option_parser.add_argument("--out", type=Path, required=True, help="folder for records and the outcome")
    option_parser.add_argument("--seconds", type=float, default=60.0)
    option_parser.add_argument("--seed", type=int, default=0)
    option_parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small shapes")
    return option_parser


def context_of(options: argparse.Namespace) -> Context:
    """Converts the command-line options of a step into its context: folder, device, time and seed."""
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if options.dry_run else "cuda"
    return Context(options.out, device, options.dry_run, options.seconds, options.seed)


def end(context: Context, function: Callable[[Context], EntryOutcome]) -> NoReturn:
    """Runs a step of the suite, writes its outcome, and ends the process with the step's exit status."""
    try:
        step_outcome = function(context)
    except ContextBroken as broken:
        print(broken)
        raise SystemExit(ExitStatus.BROKEN) from broken
    write_json(context.out / OUTCOME_FILE, step_outcome)
    status = {"PARTIAL": ExitStatus.UNDECIDED, "FAILED": ExitStatus.INCORRECT}.get(step_outcome.status, ExitStatus.DONE)
    raise SystemExit(status)


def read_outcome(path: Path) -> EntryOutcome | None:
    """Reads an entry's outcome from a file, or returns None without a file.  Raises `ValueError` on an invalid file."""
    try:
        return EntryOutcome(**json.loads(path.read_text())) if path.is_file() else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected the result of an entry, got {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, atomically.  Numbers that JSON does not support, such as infinity, become texts."""
    write_whole(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def step_words(words: Sequence[str], dry: bool = False) -> tuple[str, ...]:
    """Returns the command-line arguments of a step: `words`, and then the options that every step gets."""
    return (*words, *STEP_OPTIONS, *(["--dry-run"] if dry else []))

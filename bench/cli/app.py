"""The application: shared options, errors and exit statuses.  Its commands are the files beside this one."""

from __future__ import annotations

from pathlib import Path
from traceback import extract_tb
from typing import Annotated, NoReturn

import typer

from rooflab.bench import show

EXIT_INCORRECT, EXIT_INVALID, EXIT_USAGE = 11, 13, 2
"""Exit statuses; those of an A/B are in `rooflab.bench.ab`."""

app = typer.Typer(
    name="rooflab",
    help="A lab for LLM-inference kernels: check them, time them, place them on the roofline, run them in an engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Names = list[str] | None
Op = Annotated[str | None, typer.Argument(help="An op, as `rooflab list` names it; without one, all.")]
OpName = Annotated[str, typer.Argument(help="An op, as `rooflab list` names it.")]
KernelOption = Annotated[
    Names, typer.Option("--kernel", help="A kernel's name, or a file that registers kernels; repeatable.")
]
SuiteOption = Annotated[Names, typer.Option("--suite", help="Suite of cases; repeatable.")]
CaseOption = Annotated[Names, typer.Option("--case", "--shape", help="One case, as M=64,N=48,...; repeatable.")]
SchemeOption = Annotated[Names, typer.Option("--scheme", help="fp32, fp16 or bf16; repeatable.")]
OnlyOp = Annotated[Names, typer.Option("--op", help="Only this op; repeatable.")]
OnlyKernel = Annotated[Names, typer.Option("--kernel", help="Only this kernel; repeatable.")]
OnlyCase = Annotated[Names, typer.Option("--case", help="Only this case; repeatable.")]
OnlyMachine = Annotated[Names, typer.Option("--machine", help="Part of a machine key; repeatable.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for records and figures.", callback=lambda value: check_folder(value)),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; without it, a GPU if there is one.")]


def check_folder(path: Path | None) -> Path | None:
    """`path` if it is a folder or can become one; asked before any work is done."""
    if path is not None:
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise ValueError(f"out: expected a folder, got {str(path)!r}, and {existing} is a file")
    return path


def run() -> NoReturn:
    """The command line; bad input gives one sentence and exit status 2."""
    try:
        app(prog_name="rooflab")  # ends with SystemExit
    except ValueError as error:
        show.error(f"rooflab: {error}")
    except OSError as error:
        show.error(f"rooflab: {error.filename}: {error.strerror}" if error.filename else f"rooflab: {error}")
    except SyntaxError as error:  # of a file of this tree, which its user is changing
        show.error(f"rooflab: {error.filename}:{error.lineno}: {error.msg}")
    except ImportError as error:
        place = extract_tb(error.__traceback__)[-1]
        show.error(f"rooflab: {place.filename}:{place.lineno}: {error}")
    except MemoryError as error:
        show.error(f"rooflab: out of memory: {error}")
    raise SystemExit(EXIT_USAGE)


def exit_for(statuses: set[str]) -> None:
    """Ends with status 11 where a kernel failed, 13 where a reading is impossible or noise, or nothing ran at all."""
    if statuses - {"OK", "UNSUPPORTED", "UNAVAILABLE", "INVALID", "NOISY"}:
        raise typer.Exit(EXIT_INCORRECT)
    if statuses & {"INVALID", "NOISY"} or "OK" not in statuses:
        raise typer.Exit(EXIT_INVALID)

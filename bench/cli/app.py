"""Holds the Typer application, and handles its errors and exit statuses.  Other files here define the commands."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperCommand

from rooflab.bench import show
from rooflab.bench.base.extras import missing
from rooflab.bench.base.git import ROOT, git_says
from rooflab.bench.base.plain import first_line
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.cli.names import check_names, cuda_device_present, interpret_without_gpu
from rooflab.kernels import _card
from rooflab.kernels._user_files import MODULE_PREFIX

if TYPE_CHECKING:
    from rooflab.bench.core import Record, RunWriter


app = typer.Typer(
    name="rooflab",
    help="A lab for LLM-inference kernels: check them, time them, place them on the roofline, run them in an engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


TYPED_NAMES = {"max_model_len": "context", "max_num_seqs": "batch", "num_kv_blocks": "batch", "tensor_parallel": "gpus"}
TYPED_NAMES |= {"prefill_chunk": "chunk", "weight_dtype": "dtype", "kernel": "swap"}
"""By inner name in an error: the parameter that the user typed, in commands without a parameter of the inner name."""
USER_ERRORS = (RuntimeError, TypeError, NameError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""Errors that a user's file may raise in its reference, inputs or tolerance: shown as one sentence with the line."""


def _pretended_card() -> AbstractContextManager[object]:
    from rooflab.bench.compile.pretended import pretended_card

    return pretended_card()


class Command(TyperCommand):
    """A command that checks its model and GPU names before torch is imported.  Error messages show options as typed."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Checks the values of the options, and then runs the command."""
        try:
            check_names(ctx.params)
            interpret_without_gpu()
            if not cuda_device_present():
                _card.make_fake_gpu = _pretended_card
            with show.chosen(bool(ctx.params.get("json"))):
                return super().invoke(ctx)
        except ValueError as error:
            name, separator, message = str(error).partition(": ")
            raise ValueError(self._typed(name) + separator + message) from error

    def _typed(self, name: str) -> str:
        """Returns the option of the parameter `name` as the user typed it, or `name` if the parameter has no option."""
        typed_words, options_by_key = {argv_word.partition("=")[0] for argv_word in sys.argv}, dict[str, list[str]]()
        for param in self.params:
            for option_key in {str(param.name), *(opt_word.lstrip("-").replace("-", "_") for opt_word in param.opts)}:
                options_by_key.setdefault(option_key, []).extend(param.opts)
        options = options_by_key.get(name.replace("-", "_")) or options_by_key.get(TYPED_NAMES.get(name, ""), [name])
        return next((opt_word for opt_word in options if opt_word in typed_words), options[0])


def _show_version(asked_for: bool) -> None:
    if asked_for:
        describe_words = ("describe", "--always", "--dirty", "--exclude=*")
        commit_id = (git_says(ROOT, *describe_words) or "") if (ROOT / ".git").exists() else ""
        show.line(f"rooflab {version('rooflab')} {commit_id}".rstrip())
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Show it and end.", callback=_show_version, is_eager=True)]


@app.callback()
def main(_: Version = False) -> None:
    """Takes the options that stand before the name of a command."""


@cache
def _parser() -> Callable[..., object]:
    """Returns the parser of all commands.  The result is cached, because Typer takes 0.2 s to build the parser."""
    return typer.main.get_command(app)


def run() -> NoReturn:
    """Runs the command line.  Bad input prints one sentence and ends with exit status 2."""
    try:
        _parser()(prog_name="rooflab")  # ends with SystemExit
    except ValueError as error:
        show.error(f"rooflab: {error}")
    except OSError as error:
        show.error(f"rooflab: {error.filename}: {error.strerror}" if error.filename else f"rooflab: {error}")
    except SyntaxError as error:  # of a file of this tree, which its user is changing
        show.error(f"rooflab: {error.filename}:{error.lineno}: {error.msg}")
    except ImportError as error:
        if missing_extra := missing(error):
            show.error(f"rooflab: {missing_extra}")
            raise SystemExit(ExitStatus.USAGE) from error
        error_frame = extract_tb(error.__traceback__)[-1]
        show.error(f"rooflab: {error_frame.filename}:{error_frame.lineno}: {error}")
    except MemoryError as error:
        show.error(f"rooflab: out of memory: {error}")
    except USER_ERRORS as error:
        frames = [(frame, line, str(frame.f_globals.get("__name__"))) for frame, line in walk_tb(error.__traceback__)]
        user_frames = [(frame, line) for frame, line, module_name in frames if module_name.startswith(MODULE_PREFIX)]
        if not user_frames:
            raise  # a fault of ours, with its traceback
        frame, line = user_frames[-1]
        file_line = f"{Path(frame.f_code.co_filename).name}:{line}"
        show.error(f"rooflab: {file_line}: {type(error).__name__}: {first_line(error)}")
    raise SystemExit(ExitStatus.USAGE)


@contextmanager
def terminated_as_exception() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `SystemExit`, so that `finally` blocks run.  Does nothing outside the main thread,
    because only the main thread can set signal handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    old_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A signal that is ignored, as under nohup, stays ignored; None is a handler that no Python code has set.
    replaced_handlers = {
        signum: handler for signum, handler in old_handlers.items() if handler is not None and handler != signal.SIG_IGN
    }
    for number in replaced_handlers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in replaced_handlers.items():
            signal.signal(number, handler)


def exit_for(statuses: set[str], undecided: bool = False) -> None:
    """Ends the process with the first exit status that applies.  11: a kernel failed.  13: a reading is INVALID or
    NOISY, memory is too small, or all work was done and no status is OK.  12: some work was not done (`undecided`).
    Returns if none of them applies."""
    exit_statuses = [ExitStatus.UNDECIDED] * undecided
    no_value_statuses = {"INVALID", "NOISY", "OUT_OF_MEMORY"}
    if statuses & no_value_statuses or not (undecided or "OK" in statuses):
        exit_statuses.append(ExitStatus.INVALID)
    if statuses - {"OK", "UNSUPPORTED", "UNAVAILABLE", *no_value_statuses}:
        exit_statuses.append(ExitStatus.INCORRECT)
    if exit_statuses:
        raise typer.Exit(ExitStatus.first(exit_statuses))


def begin_run(out: Path | None, resume: bool) -> tuple[RunWriter, list[Record]]:
    """Returns a writer, and the records that its run already has.  By default the run is new and has none.  If `resume`
    is set, it is the newest run in the folder `out`.  Raises `ValueError` if `resume` is set without `out`."""
    from rooflab.bench.core import RunWriter, result_folder

    if resume and out is None:
        raise ValueError("resume: expected --out, the folder of the run to go on with")
    return RunWriter.going_on(out) if resume and out else (RunWriter(out or result_folder()), [])

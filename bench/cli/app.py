"""The application: shared options, errors and exit statuses.  Its commands are the files beside this one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from rooflab.bench import show
from rooflab.bench.calls.names import check_names
from rooflab.bench.processes.triton_mode import interpret_without_gpu
from rooflab.kernels._folders import check_writable

EXIT_INCORRECT, EXIT_INVALID, EXIT_UNDECIDED, EXIT_USAGE, EXIT_INTERRUPTED = 11, 13, 12, 2, 130
"""Exit statuses; if several apply, the first.  Those of an A/B are in `rooflab.bench.ab`."""
FROM = {
    "max_model_len": "context", "max_num_seqs": "batch", "num_kv_blocks": "batch", "tensor_parallel": "gpus",
    "prefill_chunk": "chunk", "weight_dtype": "dtype",
}  # fmt: skip
"""Settings of an engine, and the options that they come from where they have none of their own."""


class Command(TyperCommand):
    """A command that refuses wrong names before it imports torch, and whose errors name options as they are typed."""

    def make_context(self, *names: Any, **options: Any) -> Any:
        """Reads the words of the command line."""
        with self._told():
            return super().make_context(*names, **options)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        with self._told():
            check_names(ctx.params, {param.name for param in self.params if param.param_type_name == "argument"})
            interpret_without_gpu()
            return super().invoke(ctx)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except typer.BadParameter as error:
            raise ValueError(error.format_message()) from error
        except ValueError as error:
            raise ValueError(self._as_typed(str(error))) from error

    def _as_typed(self, text: str) -> str:
        """The text of an error that begins with the inner name of an option, with the option instead."""
        name, colon, rest = text.partition(": ")
        words = {word.partition("=")[0] for word in sys.argv}
        own = [param for param in self.params if _inner(name) in (param.name, *map(_inner, param.opts))]
        own = own or [param for param in self.params if param.name == FROM.get(name)]
        typed = [option for param in own for option in param.opts if option in words]
        return "".join([(typed or [param.opts[0] for param in own] or [name])[0], colon, rest])


def _inner(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


class App(typer.Typer):
    """Commands of the class above."""

    def command(self, *names: Any, **options: Any) -> Any:
        """A decorator, as Typer's."""
        return super().command(*names, **{"cls": Command, **options})


app = App(
    name="rooflab",
    help="A lab for LLM-inference kernels: check them, time them, place them on the roofline, run them in an engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def at_least(least: float, text: str | None = None, *flags: str) -> Any:
    """An option whose number is at least `least`."""
    return _checked(lambda value: value >= least, f"at least {least:g}", text, flags)


def above_zero(text: str, *flags: str) -> Any:
    """An option whose number is above 0."""
    return _checked(lambda value: value > 0, "a number above 0", text, flags)


def _checked(right: Callable[[float], bool], wanted: str, text: str | None, flags: tuple[str, ...]) -> Any:
    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not right(value):
            raise ValueError(f"{param.name}: expected {wanted}, got {value:g}")
        return value

    return typer.Option(*flags, callback=check, help=text)


def check_place(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """`path` if the folder, or the folder of the FILE, can be written to; asked before any work is done."""
    if path is not None:
        name, is_file = option.opts[-1].lstrip("-"), option.metavar == "FILE"
        if is_file and path.is_dir():
            raise ValueError(f"{name}: expected a file, got the folder {str(path)!r}")
        check_writable(name, path.parent if is_file else path)
    return path


file_option = partial(typer.Option, metavar="FILE", callback=check_place)
"""An option with a file to write."""
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
Seed = Annotated[int, at_least(0)]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for records and figures.", callback=check_place)]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; without it, a GPU if there is one.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from rooflab.bench.records.git import ROOT, git_state

        commit, dirty = git_state(ROOT)
        changed = " with changes" if dirty else ""
        show.line(f"rooflab {version('rooflab')}{f', commit {commit[:10]}{changed}' if commit else ''}")
        raise typer.Exit()


@app.callback()
def main(
    _: Annotated[bool, typer.Option("--version", help="Print it and end.", callback=_print_version, is_eager=True)] = (
        False
    ),
) -> None:
    """What comes before a command."""


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


def exit_for(statuses: set[str], undecided: bool = False) -> None:
    """Ends with status 11 where a kernel failed, 13 where a reading is impossible or noise, or nothing ran at all, and
    12 where something is `undecided`."""
    if statuses - {"OK", "UNSUPPORTED", "UNAVAILABLE", "INVALID", "NOISY"}:
        raise typer.Exit(EXIT_INCORRECT)
    if statuses & {"INVALID", "NOISY"} or "OK" not in statuses:
        raise typer.Exit(EXIT_INVALID)
    if undecided:
        raise typer.Exit(EXIT_UNDECIDED)

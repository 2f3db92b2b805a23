"""Defines the options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rooflab.bench.base import plain
from rooflab.bench.cli.names import parse_swaps
from rooflab.kernels._folders import check_writable

FILE_SUFFIXES = (".csv", ".gif", ".html", ".jpeg", ".jpg", ".json", ".jsonl", ".md", ".pdf", ".png", ".svg", ".webp")


def check_place(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Returns `path`.  Raises `ValueError` if it is not writable, or is of the wrong kind (file or folder)."""
    if path is not None:
        name, is_image_path = option.opts[-1], option.metavar == "PLACE" and path.suffix in (".svg", ".png")
        is_file = option.metavar == "FILE" or is_image_path
        if is_file and path.is_dir():
            raise ValueError(f"{name}: expected a file, got the folder {str(path)!r}")
        if not is_file and path.suffix in FILE_SUFFIXES and not path.is_dir():
            allowed_kinds = "a folder, or a file that ends in .svg or .png" if option.metavar == "PLACE" else "a folder"
            raise ValueError(f"{name}: expected {allowed_kinds}, got {str(path)!r}")
        check_writable(name, path.parent if is_file else path)
    return path


def check_seconds(option: typer.CallbackParam, seconds: float | None) -> float | None:
    """Returns `seconds`.  Raises `ValueError` if `seconds` is not greater than 0."""
    if seconds is not None and not seconds > 0:
        raise ValueError(f"{option.opts[-1]}: expected seconds above 0, got {seconds}")
    return seconds


def launcher(op: str | None, of_ops: Mapping[str, object], of_launchers: Mapping[str, object]) -> str:
    """Returns `op` if it names a launcher (a user's function that launches kernels) as path.py::function, else "".

    `of_ops` holds options that a launcher must not have; `of_launchers` holds options that an op must not have.  Raises
    `ValueError` if a forbidden option has a value, or if the file is missing or is no Python program."""
    launcher_name = op if op and "::" in op else ""
    for name, value in (of_ops if launcher_name else of_launchers).items():
        if value:
            expected_kind = "an op" if launcher_name else "path.py::function"
            raise ValueError(f"{name}: expected with {expected_kind} alone, got {value!r} with {op or 'every op'}")
    if launcher_name:
        from rooflab.bench.compile.launchers import check_launcher

        check_launcher(launcher_name)
    return launcher_name


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns `command` with options in place of its dataclass parameters: one option per field of the dataclass.

    The parameter's default value, if there is one, gives the options' defaults.  Otherwise the dataclass gives them."""
    parameters, dataclass_types = list[Parameter](), dict[str, Any]()
    type_hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        option_list = [(name, type_hints[name], parameter.default)]
        if is_dataclass(type_hints[name]):
            dataclass_types[name], kinds = type_hints[name], get_type_hints(type_hints[name], include_extras=True)
            default_instance = parameter.default
            option_list = [
                (x.name, kinds[x.name], getattr(default_instance, x.name, x.default)) for x in fields(type_hints[name])
            ]
        parameters += [
            Parameter(key, Parameter.KEYWORD_ONLY, default=value, annotation=hint) for key, hint, value in option_list
        ]

    @wraps(command)
    def called(**values: plain.Json) -> None:
        option_groups = {
            name: hint(**{x.name: values.pop(x.name) for x in fields(hint)}) for name, hint in dataclass_types.items()
        }
        command(**option_groups, **values)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def span(name: str, text: str) -> tuple[int, int]:
    """Parses `N` or `LEAST:MOST` into two numbers; `N` gives the same number twice.  Raises `ValueError` otherwise."""
    min_text, separator, max_text = text.partition(":")
    if not min_text.isdecimal() or (separator and not max_text.isdecimal()):
        raise ValueError(f"{name}: expected N or LEAST:MOST, got {text!r}")
    return int(min_text), int(max_text or min_text)


place = partial(typer.Option, callback=check_place)
"""Makes an option that takes a folder to write to."""
file = partial(place, metavar="FILE")
"""Makes an option that takes a file to write."""
seconds = partial(typer.Option, callback=check_seconds)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
"""`Command` reads the option `--json`.  With it, `show` prints a command's result; else its tables and lines."""
Names = list[str] | None
Op = Annotated[str | None, typer.Argument(help="An op, as `rooflab list` names it; without one, all ops.")]
OpName = Annotated[str, typer.Argument(help="An op, as `rooflab list` names it.")]
Kernel = Annotated[
    Names, typer.Option("--kernel", help="A kernel's name, or a Python file that registers kernels; repeatable.")
]
Argument = Annotated[
    str, typer.Option("--argument", "--arg", help="With path.py::function: other arguments, as eps=1e-6,causal=true.")
]
ArgumentDtype = Annotated[
    str,
    typer.Option("--dtype", help="With path.py::function: dtype of its tensors: fp32 (the default), int32, bool..."),
]
Inputs = Annotated[
    str | None,
    typer.Option("--inputs", help="With path.py::function: path.py::make, which returns a dict of all arguments."),
]
Suite = Annotated[Names, typer.Option("--suite", help="A suite of cases, as smollm2_135m; repeatable.")]
Case = Annotated[Names, typer.Option("--case", "--shape", help="A case: sizes and options, as M=64,N=48; repeatable.")]
Scheme = Annotated[Names, typer.Option("--scheme", help="Dtypes of the inputs, as fp32, fp16 or bf16; repeatable.")]
OnlyOp = Annotated[Names, typer.Option("--op", help="Only this op; repeatable.")]
OnlyKernel = Annotated[Names, typer.Option("--kernel", help="Only this kernel; repeatable.")]
OnlyCase = Annotated[Names, typer.Option("--case", help="Only this case; repeatable.")]
OnlyMachine = Annotated[Names, typer.Option("--machine", help="Only machines with this text in their key; repeatable.")]
Out = Annotated[Path | None, place("--out", help="Write records and figures to this folder.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; without it, a GPU if there is one.")]
Dummy = Annotated[bool, typer.Option("--dummy", help="Use random weights.")]
Swap = Annotated[Names, typer.Option("--swap", help="OP=KERNEL: use this kernel for the op; repeatable.")]
EngineDtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16, float16; on a CPU int8, int4, keep.")
]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="Launch each kernel by itself: no graphs or replays.")]
WeightsDtype = Annotated[str, typer.Option("--dtype", help="Dtype of the weights: bf16, fp16, fp32, fp8_e4m3 or int8.")]
KvDtype = Annotated[str, typer.Option(help="Dtype of the KV cache.")]
Rate = Annotated[float | None, typer.Option("--rate", help="Requests per second in an open loop; inf: all at once.")]
Sweep = Annotated[str | None, typer.Option("--sweep", help="A,B,...: measure at these rates, one after the other.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", help="Requests in flight in a closed loop; 1 if no rate is set.")
]
Data = Annotated[str, typer.Option(help="Prompts: random, sharegpt (its lengths) or prefix (groups share a prefix).")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of all that is random.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out; what it has is not made again.")]


@dataclass(frozen=True)
class Speculative:
    """Options for speculative decoding, such as the method that drafts tokens."""

    speculate: Annotated[
        str | None, typer.Option(help="Draft tokens, and verify several in a step: ngram, draft or eagle.")
    ] = None
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=16, help="Most tokens of a draft.")] = 4
    draft: Annotated[str | None, typer.Option(help="A model, or the folder of an EAGLE head.")] = None


@dataclass(frozen=True)
class EngineOptions:
    """Options for the engine that a command runs."""

    model: Annotated[str, typer.Option(help="smollm2-135m, a GGUF file, or a Hugging Face folder.")] = "smollm2-135m"
    dummy: Dummy = False
    dtype: EngineDtype = None
    swap: Swap = None
    device: Device = None
    seed: Seed = 0

    def options(self) -> dict[str, plain.Json]:
        """Returns the options as keyword arguments of the class `LLM`."""
        return {**asdict(self), "swap": parse_swaps(self.swap or [])}


@dataclass(frozen=True)
class TokenSpans:
    """Options for the lengths of prompts and answers, in tokens."""

    input_len: Annotated[str, typer.Option(help="Tokens of a prompt: N or LEAST:MOST.")] = "128"
    output_len: Annotated[str, typer.Option(help="Tokens of an answer: N or LEAST:MOST.")] = "64"

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns `((shortest, longest), (shortest, longest))` in tokens: first for prompts, then for answers."""
        return span("input_len", self.input_len), span("output_len", self.output_len)

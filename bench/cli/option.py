"""Options and arguments that several commands have, each declared once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rooflab.bench.base import plain
from rooflab.bench.cli.names import parse_swaps
from rooflab.kernels._folders import check_writable

if TYPE_CHECKING:
    from rooflab.bench.latency.speculation import SpeculativeSteps
    from rooflab.bench.latency.step_model import StepModel

OTHER_FILES = (".csv", ".gif", ".html", ".jpeg", ".jpg", ".json", ".jsonl", ".md", ".pdf", ".png", ".svg", ".webp")


def check_place(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """`path` if the folder, or the folder of the FILE or figure, can be written to; asked before any work is done."""
    if path is not None:
        name, figure = option.opts[-1], option.metavar == "PLACE" and path.suffix in (".svg", ".png")
        is_file = option.metavar == "FILE" or figure
        if is_file and path.is_dir():
            raise ValueError(f"{name}: expected a file, got the folder {str(path)!r}")
        if not is_file and path.suffix in OTHER_FILES and not path.is_dir():
            kinds = "a folder, or a file that ends in .svg or .png" if option.metavar == "PLACE" else "a folder"
            raise ValueError(f"{name}: expected {kinds}, got {str(path)!r}")
        check_writable(name, path.parent if is_file else path)
    return path


def check_seconds(option: typer.CallbackParam, seconds: float | None) -> float | None:
    """`seconds` if there is time to do anything."""
    if seconds is not None and not seconds > 0:
        raise ValueError(f"{option.opts[-1]}: expected seconds above 0, got {seconds}")
    return seconds


def launcher(op: str | None, of_ops: Mapping[str, object], own: Mapping[str, object]) -> str:
    """`op` if it is path.py::function, else an empty text; refuses the options that the other kind has."""
    found = op if op and "::" in op else ""
    for name, value in (of_ops if found else own).items():
        if value:
            wanted = "an op" if found else "path.py::function"
            raise ValueError(f"{name}: expected with {wanted} alone, got {value!r} with {op or 'every op'}")
    return found


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with an option for each field of those of its parameters that are dataclasses, in their place.

    Their defaults are those of the parameter, or of the class.
    """
    parameters, groups = list[Parameter](), dict[str, Any]()
    hints = get_type_hints(command, include_extras=True)
    for name, one in signature(command).parameters.items():
        own = [(name, hints[name], one.default)]
        if is_dataclass(hints[name]):
            groups[name], kinds = hints[name], get_type_hints(hints[name], include_extras=True)
            own = [(x.name, kinds[x.name], getattr(one.default, x.name, x.default)) for x in fields(hints[name])]
        parameters += [
            Parameter(key, Parameter.KEYWORD_ONLY, default=value, annotation=kind) for key, kind, value in own
        ]

    @wraps(command)
    def called(**given: plain.Json) -> None:
        made = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        command(**made, **given)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def span(name: str, text: str) -> tuple[int, int]:
    """Both numbers of `N` or `LEAST:MOST`.  Raises `ValueError` on another text."""
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise ValueError(f"{name}: expected N or LEAST:MOST, got {text!r}")
    return int(low), int(high or low)


place = partial(typer.Option, callback=check_place)
"""An option with a folder to write to."""
file = partial(place, metavar="FILE")
"""An option with a file to write."""
seconds = partial(typer.Option, callback=check_seconds)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
"""`Command` reads it: a command shows its `show.result`, its tables and its lines, and does not ask which are seen."""
Names = list[str] | None
Op = Annotated[str | None, typer.Argument(help="An op that `rooflab list` names; without one, all.")]
OpName = Annotated[str, typer.Argument(help="An op, as `rooflab list` names it.")]
Kernel = Annotated[
    Names, typer.Option("--kernel", help="A kernel's name, or a file that registers kernels; repeatable.")
]
Argument = Annotated[
    str, typer.Option("--argument", "--arg", help="With path.py::function: eps=1e-6,n=3,causal=true,sizes=[1,2,3],...")
]
ArgumentDtype = Annotated[
    str, typer.Option("--dtype", help="With path.py::function: fp32, fp16 or bf16; without it, fp32.")
]
Suite = Annotated[Names, typer.Option("--suite", help="Suite of cases; repeatable.")]
Case = Annotated[Names, typer.Option("--case", "--shape", help="One case, as M=64,N=48,...; repeatable.")]
Scheme = Annotated[Names, typer.Option("--scheme", help="fp32, fp16 or bf16; repeatable.")]
OnlyOp = Annotated[Names, typer.Option("--op", help="Only this op; repeatable.")]
OnlyKernel = Annotated[Names, typer.Option("--kernel", help="Only this kernel; repeatable.")]
OnlyCase = Annotated[Names, typer.Option("--case", help="Only this case; repeatable.")]
OnlyMachine = Annotated[Names, typer.Option("--machine", help="Part of a machine key; repeatable.")]
Out = Annotated[Path | None, place("--out", help="Folder for records and figures.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; without it, a GPU if there is one.")]
Dummy = Annotated[bool, typer.Option("--dummy", help="Random weights.")]
Swap = Annotated[Names, typer.Option("--swap", help="OP=KERNEL: use this kernel; repeatable.")]
EngineDtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16 or, on a CPU, int8.")]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs: kernel by kernel.")]
WeightsDtype = Annotated[str, typer.Option("--dtype", help="Dtype of the weights: bf16, fp16, fp8_e4m3 or fp32.")]
KvDtype = Annotated[str, typer.Option(help="Dtype of the KV cache.")]
Rate = Annotated[float | None, typer.Option("--rate", help="Requests per second, open loop; inf: all at once.")]
Sweep = Annotated[str | None, typer.Option("--sweep", help="A,B,...: these rates in turn.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", help="Requests in flight, closed loop; without a rate, 1.")
]
Data = Annotated[str, typer.Option(help="random, sharegpt (its lengths) or prefix (shared by groups).")]
Span = Annotated[str, typer.Option(help="Tokens: N or LEAST:MOST.")]
Seed = Annotated[int, typer.Option(min=0)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out: what it has is not done again.")]


@dataclass(frozen=True)
class Speculative:
    """How an engine drafts."""

    speculate: Annotated[
        str | None, typer.Option(help="Draft tokens, and verify several in a step: ngram, draft, medusa or eagle.")
    ] = None
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=16, help="Most tokens of a draft.")] = 4
    draft: Annotated[
        str | None, typer.Option(help="A model, a number of the model's first layers, or a folder of heads.")
    ] = None

    def steps(self, plain: StepModel) -> SpeculativeSteps:
        """Steps of a model, with the drafts beside them."""
        from rooflab.bench.latency.speculation import speculative
        from rooflab.engine.speculate.drafter import Speculation

        asked = Speculation(str(self.speculate), self.num_speculative_tokens, self.draft, sized=True)
        return speculative(asked, plain)


@dataclass(frozen=True)
class EngineOptions:
    """The engine that a command runs."""

    model: Annotated[str, typer.Option(help="smollm2-135m, a GGUF file, or a Hugging Face folder.")] = "smollm2-135m"
    dummy: Dummy = False
    dtype: EngineDtype = None
    swap: Swap = None
    device: Device = None
    seed: int = 0

    def options(self) -> dict[str, plain.Json]:
        """The options of `LLM`."""
        return {**asdict(self), "swap": parse_swaps(self.swap or [])}


@dataclass(frozen=True)
class TokenSpans:
    """How long prompts and answers are."""

    input_len: Span = "128"
    output_len: Span = "64"

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Least and most tokens of a prompt and of an answer."""
        return span("input_len", self.input_len), span("output_len", self.output_len)

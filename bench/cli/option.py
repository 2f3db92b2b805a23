"""Options and arguments that several commands have, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rooflab.kernels._folders import check_writable

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


def launcher(op: str | None, of_ops: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """`op` if it is path.py::function, else an empty text; refuses the options that the other kind has."""
    found = op if op and "::" in op else ""
    for name, value in (of_ops if found else own).items():
        if value:
            wanted = "an op" if found else "path.py::function"
            raise ValueError(f"{name}: expected with {wanted} alone, got {value!r} with {op or 'every op'}")
    return found


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
Model = Annotated[str, typer.Option("--model", help="smollm2-135m, a GGUF file, or a Hugging Face folder.")]
Dummy = Annotated[bool, typer.Option("--dummy", help="Random weights.")]
Swap = Annotated[Names, typer.Option("--swap", help="OP=KERNEL: use this kernel; repeatable.")]
EngineDtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16 or, on a CPU, int8.")]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs: kernel by kernel.")]
Speculate = Annotated[
    str | None,
    typer.Option("--speculate", help="Draft tokens, and verify several in a step: ngram, draft, medusa or eagle."),
]
Draft = Annotated[
    str | None, typer.Option("--draft", help="A model, a number of the model's first layers, or a folder of heads.")
]
Acceptance = Annotated[
    float, typer.Option("--acceptance", help="Chance that a drafted token is accepted if those before it were.")
]
NumSpeculative = Annotated[int, typer.Option("--num-speculative-tokens", min=1, max=16, help="Most tokens of a draft.")]
WeightsDtype = Annotated[str, typer.Option("--dtype", help="Dtype of the weights: bf16, fp16, fp8_e4m3 or fp32.")]
KvDtype = Annotated[str, typer.Option(help="Dtype of the KV cache.")]
Rate = Annotated[float | None, typer.Option("--rate", help="Requests per second, open loop; inf: all at once.")]
Sweep = Annotated[str | None, typer.Option("--sweep", help="A,B,...: these rates in turn.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", help="Requests in flight, closed loop; without a rate, 1.")
]
Data = Annotated[str, typer.Option(help="random, sharegpt (its lengths) or prefix (shared by groups).")]
Lengths = Annotated[str, typer.Option(help="Tokens: N or LEAST:MOST.")]
Seed = Annotated[int, typer.Option(min=0)]
Wait = Annotated[
    bool, typer.Option("--wait-for-gpu", help="Take the card's lock first, so that two such runs take turns.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out: what it has is not done again.")]

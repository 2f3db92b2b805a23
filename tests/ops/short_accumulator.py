"""Runs gemm_fp8's rungs or flash_attention/fp8 in the emulator with Hopper's short fp8 accumulator, and prints how far
they are off, as JSON.

In a process of its own, without `TRITON_INTERPRET`.  `short_accumulator.py gemm CASE KERNEL...` prints for each kernel
the largest error as a multiple of what is allowed where sums are promoted, and its errors over those of fp32 sums, as
the suite's bar takes it.  `short_accumulator.py attention CASE` prints the largest error as a multiple of what is
allowed, and the mean error over that of naive's fp32 sums: of values of one sign, where what is cut off adds up.  With
`one-sum` behind it the rung leaves all keys in the tensor cores' sum.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rooflab.bench.emulate.ours import every_launch
from rooflab.bench.emulator import QUICK, Launches
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels.flash_attention import fp8
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import Case, Inputs, get_scheme

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "results"))
from bars.gemm import errors  # noqa: E402


class Short(Launches):
    """Launches whose fp8 sums keep 14 bits."""

    def run(self, compiled: Any, grid: tuple[int, ...], args: list[Any]) -> None:
        emulate(compiled, grid, args, checks=QUICK, short_accumulator=True)


def error(name: str, case: Case) -> dict[str, float]:
    spec, scheme = get_op("gemm_fp8"), get_scheme("fp8_e4m3")
    inputs = spec.make_inputs(case, scheme, torch.device("cpu"), 0)
    with every_launch(Short()):
        found = get_kernel("gemm_fp8", name)(**inputs)
    inputs.pop("fast_accum", None)
    oracle = spec.oracle(inputs)
    (stats,) = spec.judge((found,), oracle, inputs, scheme)
    fp32 = errors(get_kernel("gemm_fp8", "naive")(**inputs), oracle[0])
    own = {what: off / fp32[what] for what, off in errors(found, oracle[0]).items()}
    return own | {"over tolerance": stats.max_error_over_tolerance}


OWN_SUM = "acc += tl.dot(weights.to(v.dtype), v)"
ONE_SUM = "acc = tl.dot(weights.to(v.dtype), v, acc)"
LAUNCH = "\n\ndef bind("
"""Where the rung's device code ends."""
CONFIG = fp8.Config(64, 128, num_warps=4, num_stages=2)


def with_one_sum(folder: str) -> ModuleType:
    """The device code whose tensor cores keep all keys in one sum."""
    text = Path(fp8.__file__).read_text().split(LAUNCH)[0]
    assert text.count(OWN_SUM) == 1
    file = Path(folder) / "with_one_sum.py"
    file.write_text(text.replace(OWN_SUM, ONE_SUM))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attention_errors(inputs: Inputs) -> dict[str, float]:
    spec, scheme = get_op("flash_attention"), get_scheme("fp8_e4m3")
    with every_launch(Short()):
        found = fp8.fp8(**inputs, config=CONFIG)
    oracle = spec.oracle(inputs)
    (stats,) = spec.judge((found,), oracle, inputs, scheme)
    off, fp32 = (
        (out.double() - oracle[0]).abs().mean().item()
        for out in (found, get_kernel("flash_attention", "naive")(**inputs))
    )
    return {"over tolerance": stats.max_error_over_tolerance, "over fp32": off / fp32}


def attention(case: Case, one_sum: bool) -> dict[str, float]:
    """The rung's errors on values of one sign."""
    planted = get_op("flash_attention").planted
    assert planted is not None
    inputs = dict(planted(case, get_scheme("fp8_e4m3"), torch.device("cpu"), 0))["values of one sign"]
    with tempfile.TemporaryDirectory() as folder:
        if one_sum:
            fp8._attention = with_one_sum(folder)._attention
        return attention_errors(inputs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, text, *more = sys.argv[1:]
    if what == "gemm":
        print(json.dumps({name: error(name, Case.parse(text)) for name in more}))
    else:
        print(json.dumps(attention(Case.parse(text), more == ["one-sum"])))

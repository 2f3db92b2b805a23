"""Runs flash_attention/fp8 in the emulator with Hopper's short fp8 accumulator, and prints how far it is off.

In a process of its own, without `TRITON_INTERPRET`: `python tests/short_attention.py CASE` prints, as JSON, the largest
error as a multiple of what is allowed, and the mean error over that of naive's fp32 sums: of values of one sign, where
what is cut off adds up.  With `one-sum` as second argument the rung leaves all keys in the tensor cores' sum.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from short_accumulator import Short

from rooflab.bench.emulate.emulation import emulating_launches
from rooflab.kernels.flash_attention import _fp8_device, fp8
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import Case, Inputs, get_scheme

OWN_SUM = "acc += tl.dot(weights.to(v.dtype), v)"
ONE_SUM = "acc = tl.dot(weights.to(v.dtype), v, acc)"
CONFIG = fp8.Config(64, 128, num_warps=4, num_stages=2)


def with_one_sum(folder: str) -> ModuleType:
    """The device code whose tensor cores keep all keys in one sum."""
    text = Path(_fp8_device.__file__).read_text()
    assert text.count(OWN_SUM) == 1
    file = Path(folder) / "with_one_sum.py"
    file.write_text(text.replace(OWN_SUM, ONE_SUM))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def errors(inputs: Inputs) -> dict[str, float]:
    spec, scheme = get_op("flash_attention"), get_scheme("fp8_e4m3")
    with emulating_launches(Short()):
        found = fp8.flash_attention(**inputs, config=CONFIG)
    oracle = spec.oracle(inputs)
    (stats,) = spec.judge((found,), oracle, inputs, scheme)
    off, fp32 = (
        (out.double() - oracle[0]).abs().mean().item()
        for out in (found, get_kernel("flash_attention", "naive")(**inputs))
    )
    return {"over tolerance": stats.max_error_over_tolerance, "over fp32": off / fp32}


if __name__ == "__main__":
    torch.set_num_threads(1)
    case, scheme = Case.parse(sys.argv[1]), get_scheme("fp8_e4m3")
    planted = get_op("flash_attention").planted
    assert planted is not None
    inputs = dict(planted(case, scheme, torch.device("cpu"), 0))["values of one sign"]
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[2:] == ["one-sum"]:
            fp8.attend = with_one_sum(folder).attend
        print(json.dumps(errors(inputs)))

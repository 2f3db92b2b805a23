"""Runs gemm_fp8's rungs or flash_attention/fp8 in the emulator with Hopper's short fp8 accumulator, and prints their
errors as JSON.

It runs in its own process, without `TRITON_INTERPRET`.  `short_accumulator.py gemm_fp8 CASE KERNEL...` prints for each
kernel the largest error as a multiple of the error that is allowed if sums are promoted.  Attention has values of one
sign, so that all cut parts add up.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from rooflab.bench.emulate.ours import every_launch
from rooflab.bench.emulator import QUICK, Launches
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels.flash_attention.fp8 import Config
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import Case, Inputs, get_scheme


class Short(Launches):
    """Launches whose fp8 sums keep 14 bits."""

    def run(self, compiled: Any, grid: tuple[int, ...], args: list[Any]) -> None:
        emulate(compiled, grid, args, checks=QUICK, short_accumulator=True)


def inputs_of(op: str, case: Case) -> Inputs:
    spec, made = get_op(op), (case, get_scheme("fp8_e4m3"), torch.device("cpu"), 0)
    if op == "gemm_fp8":
        return spec.make_inputs(*made)
    assert spec.planted is not None
    return dict(spec.planted(*made))["values of one sign"]


def error(op: str, name: str, inputs: Inputs) -> float:
    more = {"config": Config(64, 128, num_warps=4, num_stages=2)} if op == "flash_attention" else {}
    with every_launch(Short()):
        found = get_kernel(op, name).fn(**inputs, **more)
    inputs = {key: value for key, value in inputs.items() if key != "fast_accum"}
    (stats,) = get_op(op).judge((found,), get_op(op).oracle(inputs), inputs, get_scheme("fp8_e4m3"))
    return stats.max_error_over_tolerance


if __name__ == "__main__":
    torch.set_num_threads(1)
    op, text, *names = sys.argv[1:]
    inputs = inputs_of(op, Case.parse(text))
    print(json.dumps({name: error(op, name, inputs) for name in names}))

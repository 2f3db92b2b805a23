"""Runs rungs of gemm_fp8 in the emulator with Hopper's short fp8 accumulator, and prints how far they are off.

In a process of its own, without `TRITON_INTERPRET`: `python tests/short_accumulator.py CASE KERNEL...` prints, as JSON,
for each kernel the largest error as a multiple of what is allowed where sums are promoted, and its errors over those of
fp32 sums, as the suite's bar takes it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from rooflab.bench.emulate.emulation import QUICK, Launches, emulating_launches
from rooflab.bench.ptx.launch import emulate
from rooflab.bench.suite.bars.gemm import errors
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import Case, get_scheme


class Short(Launches):
    """Launches whose fp8 sums keep 14 bits."""

    def run(self, compiled: Any, grid: tuple[int, ...], args: list[Any]) -> None:
        emulate(compiled, grid, args, checks=QUICK, short_accumulator=True)


def error(name: str, case: Case) -> dict[str, float]:
    spec, scheme = get_op("gemm_fp8"), get_scheme("fp8_e4m3")
    inputs = spec.make_inputs(case, scheme, torch.device("cpu"), 0)
    with emulating_launches(Short()):
        found = get_kernel("gemm_fp8", name)(**inputs)
    inputs.pop("fast_accum", None)
    oracle = spec.oracle(inputs)
    (stats,) = spec.judge((found,), oracle, inputs, scheme)
    fp32 = errors(get_kernel("gemm_fp8", "naive")(**inputs), oracle[0])
    own = {what: off / fp32[what] for what, off in errors(found, oracle[0]).items()}
    return own | {"over tolerance": stats.max_error_over_tolerance}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: error(name, Case.parse(sys.argv[1])) for name in sys.argv[2:]}))

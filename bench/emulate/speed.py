"""How fast the emulator runs a launch on one core, with its checks off and with all of them on.

    OMP_NUM_THREADS=1 python -m rooflab.bench.emulate.speed

Beside a NumPy product of 512 x 512 matrices in fp32, timed in the same rounds: what a machine does with it says how
fast the machine is.  Compilation and the generation of Python are left out: they come once a kernel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rooflab.bench.emulate.emulation import Launches, emulating_launches
from rooflab.bench.ptx.launch import Checks, emulate
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import RunWriter
from rooflab.bench.records.record import Record
from rooflab.kernels import registry
from rooflab.kernels.configs import make_config
from rooflab.reference.spec import Case, get_scheme

ROUNDS = 7
PRODUCT = 512
TILE = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3}
ATTENTION = "B=1,T=128,S={},H=1,H_kv=1,D=64,causal=false"


class Speed(NamedTuple):
    """One launch to time."""

    name: str
    op: str
    kernel: str
    case: str
    config: dict[str, Any] | None


SPEEDS = (
    Speed("one 128x128 tile, K 512", "gemm", "pipelined", "M=128,N=128,K=512,layout=NT,bias=false", TILE),
    Speed("512x512x512, 16 tiles", "gemm", "pipelined", "M=512,N=512,K=512,layout=NT,bias=false", TILE),
    Speed("attention, 128 queries, 1024 keys", "flash_attention", "online", ATTENTION.format(1024), None),
    Speed("attention, 128 queries, 4096 keys", "flash_attention", "online", ATTENTION.format(4096), None),
    Speed("64 rows of 4096", "rmsnorm", "fused", "T=64,H=4096,eps=1e-05", None),
)


def measure(speed: Speed, rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds of a launch with checks off and on, and of the NumPy product, interleaved."""
    spec, kernel, scheme = registry.get_op(speed.op), registry.get_kernel(speed.op, speed.kernel), get_scheme("bf16")
    inputs = spec.make_inputs(spec.check_case(Case.parse(speed.case)), scheme, torch.device("cpu"), 0)
    given = {name: value for name, value in inputs.items() if name in kernel.accepted}
    if speed.config is not None:
        given["config"] = make_config(kernel, {**speed.config, "group_m": 8})
    times: dict[str, list[float]] = {"off_ms": [], "on_ms": [], "numpy_ms": []}
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((PRODUCT, PRODUCT), np.float32) for _ in range(2))

    class Timed(Launches):
        """Runs each launch many times over."""

        def run(self, compiled: Any, grid: tuple[int, ...], args: list[Any]) -> None:
            """Once to generate, and then the rounds."""
            for number in range(rounds + 1):
                for name, call in _calls(compiled, grid, args, a, b).items():
                    began = time.perf_counter()
                    call()
                    if number:
                        times[name].append(1e3 * (time.perf_counter() - began))

    with emulating_launches(Timed()):
        kernel.fn(**given)
    return {name: statistics.median(values) for name, values in times.items()}


def _calls(compiled: Any, grid: tuple[int, ...], args: list[Any], a: Any, b: Any) -> dict[str, Callable[[], object]]:
    return {
        "off_ms": lambda: emulate(compiled, grid, args, checks=Checks.none()),
        "on_ms": lambda: emulate(compiled, grid, args, checks=Checks()),
        "numpy_ms": lambda: a @ b,
    }


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Speed of the emulator.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    environment = snapshot()
    writer = RunWriter(arguments.out) if arguments.out else None
    for speed in SPEEDS:
        found = measure(speed, arguments.rounds)
        print(
            f"{speed.name}: {found['off_ms']:.1f} ms, {found['on_ms']:.1f} ms with all checks"
            f" ({found['on_ms'] / found['off_ms']:.2f} times); NumPy {PRODUCT}^3 {found['numpy_ms']:.2f} ms"
        )
        if writer is not None:
            writer.write(
                Record(
                    kind="engine",
                    run_id=writer.run_id,
                    status="OK",
                    environment=environment.to_dict(),
                    commit=environment.commit,
                    dirty=environment.dirty,
                    case_id=f"emulator_speed: {speed.name}",
                    case={"op": speed.op, "kernel": speed.kernel, "case": speed.case},
                    device="cpu",
                    metrics=found,
                )
            )


if __name__ == "__main__":
    main()

"""Bounds, published times, ledgers and clock of a step are the same numbers as before, to 13 digits.

python tests/latency/test_step_golden.py     keeps today's numbers in step_golden.json
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.ledger import from_kernels
from rooflab.bench.latency.step_model import KernelTimes, StepWork
from rooflab.bench.load.arrivals import Arrivals
from rooflab.bench.load.data import Data
from rooflab.bench.load.metrics import summarize
from rooflab.bench.load.run import Plan
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.llm import estimate

KEPT = Path(__file__).parent / "step_golden.json"
MODELS = [
    ("llama-3.1-8b", "h100-sxm", "bf16", "bf16", 1),
    ("llama-3.1-8b", "h100-sxm", "fp8_e4m3", "fp8_e4m3", 1),
    ("llama-3.1-70b", "h200", "bf16", "bf16", 4),
    ("qwen3-0.6b", "a100-80gb", "bf16", "bf16", 2),
    ("smollm2-135m", "h100-sxm", "fp16", "fp8_e4m3", 1),
]
SIZES = [(7, 1000), (64, 8192)]
WORK = [StepWork(5, 6000, ((0, 100), (512, 1024)), 6), StepWork(300, 90_000, (), 300), StepWork(0, 0, ((0, 4096),), 0)]


def numbers() -> dict[str, list[Any]]:
    """By question, the numbers of its answer."""
    found: dict[str, list[Any]] = {}
    for name, gpu, weights, kv, gpus in MODELS:
        arch, device, key = get_architecture(name), get_device(gpu), f"{name} {gpu} {weights} {kv} x{gpus}"
        for batch, context in SIZES:
            context = min(context, arch.max_position)
            told = estimate(arch, device, batch, context, weights, kv, tensor_parallel=gpus)
            steps = [told.published_prefill, told.published_decode]
            found[f"estimate {key} {batch} {context}"] = [
                told.least_ttft_ms, told.least_itl_ms, told.max_sequences, told.activation_bytes_per_gpu,
                *(op.ms for step in steps if step for op in step.ops),
            ]  # fmt: skip
            model = KernelTimes(arch, device, weights, kv, gpus)
            for bounds in (False, True):
                for kind in ("decode", "prefill"):
                    ledger = from_kernels(replace(model, bounds=bounds), kind, batch, context)
                    found[f"ledger {kind} {bounds} {key} {batch} {context}"] = [
                        [row.op, row.site, row.calls, row.shape, row.ms, row.bound_ms, row.flops, row.least_bytes]
                        for row in ledger.rows
                    ]
            found[f"seconds {key}"] = [model.seconds(work) for work in WORK]
    data = Data(input_len=(100, 300), output_len=(3, 30))
    arch, device = get_architecture(MODELS[0][0]), get_device(MODELS[0][1])
    trace = simulate(
        KernelTimes(arch, device, host_ms=0.5), Plan(data=data, num_prompts=40, arrivals=Arrivals(20.0), seed=3),
        ClockSettings(2000, max_num_batched_tokens=512),
    )  # fmt: skip
    found["clock"] = [value for value in summarize(trace).values() if isinstance(value, float)]
    return found


def flat(value: Any) -> list[Any]:
    """The numbers and names in nested lists, in order."""
    return [item for part in value for item in flat(part)] if isinstance(value, list) else [value]


@pytest.mark.more
def test_the_numbers_are_those_of_before() -> None:
    """The last digit of a sum depends on the width of the CPU's vectors: NumPy adds in another order."""
    now = json.loads(json.dumps(numbers()))
    kept = json.loads(KEPT.read_text())
    assert now.keys() == kept.keys()
    for key, values in now.items():
        assert flat(values) == [
            pytest.approx(number, rel=1e-13, abs=0) if isinstance(number, float) else number
            for number in flat(kept[key])
        ], key


if __name__ == "__main__":
    KEPT.write_text(json.dumps(numbers(), allow_nan=False) + "\n")

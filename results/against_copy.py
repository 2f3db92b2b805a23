"""Predicted times of kernels over rows beside a copy of as many bytes, for each rung and case of their bars.

    python results/against_copy.py --gpu h100 --out results/predicted/rows.md

A copy is taken to reach the bandwidth that cards sustain (`predict/chip.py`).  What a launch takes is in the predicted
time and not in the copy's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from targets.one_token import TARGETS as ONE_TOKEN
from targets.rows import TARGETS

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.predict.chip import HBM_SUSTAINED
from rooflab.bench.predict.explain import Explanation, explain
from rooflab.bench.predict.model import LEAST, SUSTAINED
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import Device, get_device

ROPE = (
    "T=4096,H=32,H_kv=8,D=128,rotary=128,max_position=131072,num_blocks=512,block_size=16,skipped=0,interleaved=false"
)
MORE = {
    "layernorm": ("T=32768,H=4096,bias=true,eps=1e-05",),
    "softmax": ("T=32768,H=4096", "T=512,H=128256"),
    "rope_and_cache": (ROPE, f"{ROPE},norm_eps=1e-06"),
}
"""Cases of ops that have no bar here."""

NOTE = (
    "Nothing here was measured. Predicted: `rooflab explain`, uncalibrated, bf16. `python "
    "results/against_copy.py` writes this page. A copy is taken to reach the bandwidth that cards sustain; a "
    "launch is in the predicted time alone, so one token has no share. For many rows the prediction sees little but "
    "bytes: on public kernels of this kind it errs by 6% in the median, and it cannot tell these rungs apart. What a "
    "rung does not take has its reason. Sampling is not here: how often its loops run depends on the logits, which the "
    "prediction does not see."
)


def targets() -> list[KernelCase]:
    """Every rung of the bars' cases, many rows and then one token."""
    bars = [*TARGETS, *(bar for bar in ONE_TOKEN if bar.arguments["op"] in {row.arguments["op"] for row in TARGETS})]
    asked = [(bar.ops[0], text) for bar in bars for text in bar.arguments.get("least") or [bar.arguments["case"]]]
    asked += [(op, text) for op, texts in MORE.items() for text in texts]
    scheme = get_scheme("bf16")
    return [
        KernelCase(op, kernel.name, Case.parse(text), scheme)
        for op, text in asked
        for kernel in registry.kernels(op).values()
        if kernel.role == "optimized" and "cuda" in kernel.devices
    ]


def row(device: Device, answer: Explanation) -> list[str]:
    """One line of the table."""
    name = [answer.target.op, answer.target.case.id, answer.target.kernel]
    copy_us = answer.least_bytes / (device.ceilings().hbm_bytes_per_s * HBM_SUSTAINED) * 1e6
    if answer.predicted_ms is None:
        return [*name, "", f"{copy_us:.1f}", "", answer.reason]
    parts = [part for part in answer.parts if part.name not in (LEAST, SUSTAINED)]
    largest = max(parts, key=lambda part: part.ms)
    predicted_us = answer.predicted_ms * 1e3
    cause = f"{largest.name}, {largest.ms * 1e3:.1f} us"
    share = f"{copy_us / predicted_us:.0%}" if copy_us > 1 else ""
    return [*name, f"{predicted_us:.1f}", f"{copy_us:.1f}", share, cause]


def page(device: Device, rows: Sequence[Sequence[str]]) -> str:
    """The table as Markdown."""
    head = ["op", "case", "kernel", "predicted_us", "copy_us", "of a copy", "largest other part"]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([f"# Kernels over rows beside a copy, on an {device.full_name}", "", NOTE, "", *lines, ""])


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Predicted times of kernels over rows beside a copy of as many bytes.")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = get_device(arguments.gpu)
    text = page(device, [row(device, answer) for answer in explain(targets(), device)])
    print(text)
    if arguments.out:
        write_whole(arguments.out, text)


if __name__ == "__main__":
    main()

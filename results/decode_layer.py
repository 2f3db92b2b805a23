"""What one decoder layer launches outside its products and attention, and the predicted time of that, plan by plan.

    python results/decode_layer.py --gpu h100 --out results/predicted/decode_layer.md

A plan names a kernel for each op.  Kernels that are not ours have no compiled code here: their time is launches and
bytes.  PDL (`kernels/_pdl.py`) hides at most a kernel's launch and what it asks for before it waits; the page shows
the time without launches, which no plan can go below.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.predict.explain import Explanation, explain
from rooflab.bench.predict.model import LAUNCH
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.architecture import Architecture, get_architecture
from rooflab.roofline.device import Device, get_device
from rooflab.roofline.steps import step_bound, step_ops

MODELS = ("llama-3.1-8b", "qwen3-0.6b")
BATCHES = (1, 16, 64, 256)
CONTEXT = 4096
PLANS = ("naive", "library", "one kernel an op", "norms of heads in rope_and_cache", "silu_and_mul in its product")
ONE, ROPE, PRODUCT = PLANS[2:]

NOTE = (
    "Nothing here was measured. Predicted: `rooflab explain`, uncalibrated, bf16, in a CUDA graph. `python "
    "results/decode_layer.py` writes this page. *launches* and *us* are those of one layer outside its "
    "products and attention; between *us* and *without launches* lies what programmatic dependent launch can save. "
    "Public kernels took 1 to 4 us more a launch in graphs than the 1.3 us counted here. *of the layer*: beside the "
    f"products and the attention over {CONTEXT:,} tokens of each sequence at their bounds. In the last plan the time "
    "of the product with the activation, less that of the product alone, stands for the activation; predictions of "
    "products err by more than this difference."
)


def plan_targets(arch: Architecture, rows: int, plan: str) -> Iterator[tuple[KernelCase, int]]:
    """The kernels of a plan, and how often a layer of `arch` calls each for `rows` sequences."""
    H, D, heads, kv_heads = arch.hidden_size, arch.head_dim, arch.num_heads, arch.num_kv_heads
    kernel = plan if plan in PLANS[:2] else "fused"

    def target(op: str, **sizes: float | bool | str) -> KernelCase:
        name = kernel if kernel in registry.kernels(op) else "naive"
        return KernelCase(op, name, Case(**sizes), get_scheme("bf16"))

    rope: dict[str, int | float | bool] = {
        **{"T": rows, "H": heads, "H_kv": kv_heads, "D": D, "rotary": D, "max_position": 2 * CONTEXT},
        **{"num_blocks": 1024, "block_size": 16, "skipped": 0, "interleaved": False},
    }
    eps = arch.rms_norm_eps
    yield target("fused_add_rmsnorm", T=rows, H=H, eps=eps), 2
    fused_norms = arch.qk_norm and plan in (ROPE, PRODUCT)
    if arch.qk_norm and not fused_norms:
        yield target("rmsnorm", T=rows * heads, H=D, eps=eps), 1
        yield target("rmsnorm", T=rows * kv_heads, H=D, eps=eps), 1
    if fused_norms:
        rope["norm_eps"] = eps
    yield target("rope_and_cache", **rope), 1
    if plan != PRODUCT:
        yield target("silu_and_mul", T=rows, I=arch.intermediate_size), 1


def products(arch: Architecture, rows: int) -> tuple[list[KernelCase], list[KernelCase]]:
    """The kernels of the product with the activation, and of the product alone."""
    sizes: dict[str, int | str] = {"M": rows, "K": arch.hidden_size, "layout": "NT"}

    def own(op: str, **more: int | bool) -> list[KernelCase]:
        kernels = [k for k in registry.kernels(op).values() if k.role == "optimized" and "cuda" in k.devices]
        return [
            KernelCase(op, k.name, Case(**sizes, **more), get_scheme("bf16")) for k in kernels if k.backend != "cpp"
        ]

    width = arch.intermediate_size
    return own("gemm_silu_and_mul", I=width), own("gemm", N=2 * width, bias=False)


def table(device: Device) -> list[list[str]]:
    """One line for each model, batch and plan."""
    lines = []
    for name in MODELS:
        arch = get_architecture(name)
        for rows in BATCHES:
            joined, alone = products(arch, rows)
            plans = {plan: list(plan_targets(arch, rows, plan)) for plan in PLANS}
            asked = [*joined, *alone, *(target for pairs in plans.values() for target, _ in pairs)]
            answers = dict(zip(asked, explain(asked, device), strict=True))
            best = [min(_us(answers[each]) for each in some) for some in (joined, alone)]
            ceilings = device.ceilings()
            others = [cost for cost in step_ops(arch, "decode", rows, CONTEXT) if _is_beside(cost.site)]
            beside_us = sum(bound.least_ms for bound in step_bound(others, ceilings).ops) * 1e3 / arch.num_layers
            for plan, pairs in plans.items():
                if plan == ROPE and not arch.qk_norm:
                    continue
                us = sum(calls * _us(answers[target]) for target, calls in pairs)
                launches = sum(calls * answers[target].launches for target, calls in pairs)
                hidden = sum(calls * _launch_us(answers[target]) for target, calls in pairs)
                us += max(best[0] - best[1], 0.0) if plan == PRODUCT else 0.0
                share = us / (us + beside_us)
                lines.append([name, str(rows), plan, str(launches), f"{us:.1f}", f"{us - hidden:.1f}", f"{share:.0%}"])
    return lines


def _is_beside(site: str) -> bool:
    return site.endswith("_proj") or site == "attention"


def _us(answer: Explanation) -> float:
    return float("inf") if answer.predicted_ms is None else answer.predicted_ms * 1e3


def _launch_us(answer: Explanation) -> float:
    return sum(part.ms * 1e3 for part in answer.parts if part.name == LAUNCH)


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Launches and predicted time of a decoder layer's small kernels.")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = get_device(arguments.gpu)
    head = ["model", "batch", "plan", "launches", "us", "without launches", "of the layer"]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *table(device))]
    title = f"# A decoder layer outside its products and attention, on an {device.full_name}"
    text = "\n".join([title, "", NOTE, "", *lines, ""])
    print(text)
    if arguments.out:
        write_whole(arguments.out, text)


if __name__ == "__main__":
    main()

"""What does a fused kernel save of bytes, and of time?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.bench.core import time_functions
from rooflab.bench.latency.study import Lab, Study, at_least, curves
from rooflab.engine.llm import LLM
from rooflab.kernels.registry import Kernel

WIDTH = 1024


def run(lab: Lab) -> Study:
    """An add and a norm, and SiLU and a product, each as torch's calls one by one and as the engine's one kernel.

    Predicted: the ratio of their bytes.  Apart, each operand and result of every op that torch runs goes from memory or
    to it; fused, each tensor once.  The claim is judged from both sides: where the bytes say more than the times, and
    where they say less, it is not the trips that explain the gain.
    """
    llm = lab.llm(max_num_seqs=1, num_kv_blocks=64, max_model_len=128)
    rows: list[dict[str, Any]] = []
    sizes = (64, 256) if lab.quick else (64, 512, 4096, 16384)
    for tokens in sizes:
        x, residual = (torch.randn(tokens, WIDTH, dtype=llm.dtype, device=llm.device) for _ in range(2))
        weight, both = torch.ones(WIDTH, dtype=llm.dtype, device=llm.device), torch.cat((x, residual), 1)
        norm, gate = (_kernel(llm, op) for op in ("fused_add_rmsnorm", "silu_and_mul"))
        # What is called apart and fused, and how many tensors of x's size the fused kernel moves.
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
            "add, norm": (partial(_norm, x, residual, weight), partial(norm.fn, x, residual, weight, 1e-5), 4),
            "silu, mul": (partial(_gated, both), partial(gate.fn, both), 3),
        }
        for name, (apart, fused, tensors) in pairs.items():
            moved, least = _bytes(apart), tensors * x.nbytes
            found = time_functions({"apart": apart, "fused": fused}, llm.device, budget_s=lab.size(100, 5) / 100)
            times = {key: 1e6 * samples.median_s for key, samples in found.items()}
            rows.append({
                "ops": name, "tokens": tokens, "apart_us": times["apart"], "fused_us": times["fused"],
                "gain": times["apart"] / times["fused"], "predicted": moved / least,
                "MB_apart": moved / 1e6, "MB_fused": least / 1e6,
            })  # fmt: skip
    last = [row for row in rows if row["tokens"] == sizes[-1]]
    ratios = [row["gain"] / row["predicted"] for row in last]
    names = dict.fromkeys(row["ops"] for row in rows)
    plain = [kernel.id for kernel in (norm, gate) if kernel.role != "optimized"]
    said = f"needs fused kernels, and here serve {' and '.join(plain)}; " if plain else ""
    own = {name: [row for row in rows if row["ops"] == name] for name in names}
    return Study(
        claim="A fused kernel pays because trips to memory do",
        source="FlashAttention (Dao et al., NeurIPS 2022) and every fused norm since",
        rows=rows,
        verdict="not tested" if plain else at_least(min(min(ratio, 1 / ratio) for ratio in ratios), 0.85, 0.5),
        number=said
        + "; ".join(
            f"{row['ops']} at {row['tokens']} tokens: {row['gain']:.2f} times faster, {row['predicted']:.2f} by bytes"
            for row in last
        ),
        curves=[
            curve for name, found in own.items()
            for curve in curves(found, "tokens", {name: "gain", f"{name}, predicted": "predicted"})
        ],
        x="tokens", y="times faster", about=f"{lab.about(llm)}, rows of {WIDTH}, caches emptied before each call",
    )  # fmt: skip


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the operands and results of every op that is no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            results = result if isinstance(result, tuple) else (result,)
            self.bytes += sum(one.nbytes for one in (*args, *results) if isinstance(one, torch.Tensor))
        return result


def _bytes(function: Callable[[], Any]) -> int:
    counted = _Counted()
    with counted:
        function()
    return counted.bytes


def _norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    added = x + residual
    return torch.nn.functional.rms_norm(added, (WIDTH,), weight, 1e-5), added


def _gated(both: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(both[:, :WIDTH]) * both[:, WIDTH:]


def _kernel(llm: LLM, op: str) -> Kernel:
    return next(choice.kernel for choice in reversed(llm.ops.choices) if choice.op == op)

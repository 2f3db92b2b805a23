"""Attention over dense keys and values: softmax(Q K^T * scale) V per head.  Options and tolerance: `attention.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from rooflab.reference.attention import (
    TILE_EDGES,
    Scores,
    attend,
    attention_cost,
    error_bounds,
    get_scale,
    listen,
    low_precision,
    seen_keys,
    shout,
)
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Outputs:
    """softmax(q k^T * softmax_scale) v in fp64, head h of q reading head h // (H / H_kv) of k and v.

    q: (B, T, H, D); k, v: (B, S, H_kv, D); returns (B, T, H, D), and with `return_lse` the log-sum-exp (B, T, H) too.
    `causal` is bottom-right aligned: query i sees keys j <= i + S - T, with `window` the newest of them only; a query
    that sees none gives 0. `softmax_scale` None is D**-0.5; `softcap` caps the scaled scores; sinks: (H,) fp32.
    """
    seen = seen_keys(q.shape[1], k.shape[1], causal, window)
    scores = Scores(get_scale(q, softmax_scale), softcap)
    found = [attend(*batch, seen, scores, sinks) for batch in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(part) for part in zip(*found, strict=True))
    return (out, lse) if return_lse else out


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """The bounds that `attention` derives, fp64: (B, T, H, D), and (B, T, H) where the log-sum-exp is asked for."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    seen = seen_keys(q.shape[1], k.shape[1], inputs.get("causal", False), inputs.get("window"))
    scores = Scores(get_scale(q, inputs.get("softmax_scale")), inputs.get("softcap"))
    sinks = inputs.get("sinks")
    found = [error_bounds(*batch, seen, scores, scheme, sinks) for batch in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(part) for part in zip(*found, strict=True))
    return (out + scheme.unit_roundoff * oracle[0].abs(), lse)[: len(oracle)]


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Normal q (B, T, H, D) and k, v (B, S, H_kv, D), and the options that the case asks for."""
    B, T, S, H, H_kv, D = (int(case[key]) for key in ("B", "T", "S", "H", "H_kv", "D"))
    dtype = scheme.activation
    return {
        "q": randn(B, T, H, D, dtype=dtype, device=device, seed=seed),
        "k": randn(B, S, H_kv, D, dtype=dtype, device=device, seed=seed + 1),
        "v": randn(B, S, H_kv, D, dtype=dtype, device=device, seed=seed + 2),
        "causal": bool(case["causal"]),
        **options(case, H, device, seed + 3),
    }


def options(case: Case, H: int, device: torch.device, seed: int) -> dict[str, Any]:
    """The options of attention that a case sets; nothing of those that it leaves out."""
    found: dict[str, Any] = {}
    if case.get("window"):
        found["window"] = int(case["window"])
    if case.get("softcap"):
        found["softcap"] = float(case["softcap"])
    if case.get("sinks"):
        found["sinks"] = randn(H, dtype=torch.float32, device=device, seed=seed)
    if case.get("lse"):
        found["return_lse"] = True
    return found


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """One dominant key at each tile edge, at the ends, on the causal diagonal and at the window's far end; one past
    the end, which is poison."""
    T, S, window = int(case["T"]), int(case["S"]), int(case.get("window", 0))
    places = {j: f"key {j}" for j in (*TILE_EDGES, S // 2, S - 1) if 0 <= j < S}
    middle = S - T + T // 2
    if case["causal"]:
        edges = {middle: "diagonal", middle - window + 1: "window's end", middle - window: "before the window"}
        chosen = edges.items() if window else [(middle, "diagonal")]
        places |= {j: f"{label} of query {T // 2}" for j, label in chosen if 0 <= j < S}
    for j, label in sorted(places.items()):
        inputs = make_inputs(case, scheme, device, seed)
        listen(inputs["q"], inputs["k"])
        shout(inputs["k"], inputs["v"], (slice(None), j))
        yield label, inputs
    if S:
        inputs = make_inputs(case, scheme, device, seed)
        listen(inputs["q"], inputs["k"])
        for name in ("k", "v"):
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, 0, 0, 0, 0, 1))
        shout(inputs["k"], inputs["v"], (slice(None), S))
        inputs["v"][:, S] = math.nan
        inputs |= {"k": inputs["k"][:, :S], "v": inputs["v"][:, :S]}
        yield "poison one past the last key", inputs
    yield from low_precision(make_inputs(case, scheme, device, seed), "q", "k", "v")


def cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Cost:
    """Two products over the visible pairs, one exponential each; what nobody sees or asks for is not read."""
    B, T, H, D = q.shape
    seen = seen_keys(T, k.shape[1], causal, window)
    counts = seen.counts
    asked = int(seen.end.max() - seen.first.min()) if int(counts.sum()) else 0
    read = nbytes(q) * int((counts > 0).sum()) / max(T, 1) + nbytes(k, v) * asked / max(k.shape[1], 1)
    return attention_cost(
        B * H * int(counts.sum()), D, q, read + nbytes(sinks), lse_rows=B * T * H if return_lse else 0
    )


def _case(T: int, S: int, H: int, H_kv: int, D: int, causal: bool, B: int = 1, **more: bool | int | float) -> Case:
    return Case(B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal, **more)


SPEC = OpSpec(
    name="flash_attention",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "lse"),
    output_dtypes={"lse": torch.float32},
    optional={"window": 0, "softcap": 0.0, "sinks": False, "lse": False},
    tolerance=tolerance,
    planted=planted,
    cases={
        "smoke": (
            _case(48, 48, 4, 2, 64, True),
            _case(33, 80, 3, 1, 64, False, B=2),
            _case(20, 70, 4, 4, 128, True),
        ),
        "edge": (
            _case(1, 1, 1, 1, 64, True),
            _case(1, 129, 8, 1, 64, True),
            _case(1, 65, 2, 2, 128, False),
            _case(17, 65, 3, 1, 64, True),
            _case(70, 17, 3, 1, 64, True),
            _case(70, 17, 2, 1, 64, False),
            _case(63, 64, 4, 1, 128, True),
            _case(64, 63, 4, 1, 64, True),
            _case(65, 65, 9, 3, 64, True),
            _case(128, 128, 2, 1, 128, True),
            _case(127, 129, 1, 1, 64, False),
            _case(16, 16, 2, 2, 64, True, B=3),
            _case(5, 0, 2, 1, 64, True),
            _case(70, 65, 3, 1, 64, True, lse=True),
            _case(5, 0, 2, 1, 64, True, lse=True),
            _case(33, 70, 7, 1, 64, True, window=17),
            _case(130, 129, 2, 2, 64, True, window=64, lse=True),
            _case(65, 130, 4, 2, 128, True, softcap=30.0),
            _case(66, 64, 16, 1, 64, True, sinks=True, lse=True),
            _case(40, 150, 8, 2, 64, True, window=32, softcap=20.0, sinks=True, lse=True),
            _case(33, 47, 2, 1, 80, True),
            _case(33, 47, 2, 1, 96, False),
            _case(20, 129, 2, 1, 192, True),
            _case(20, 65, 2, 2, 256, True),
        ),
        "smollm2_135m": (_case(512, 512, 9, 3, 64, True), _case(2048, 2048, 9, 3, 64, True)),
        "qwen3_0_6b": (_case(512, 512, 16, 8, 128, True), _case(2048, 2048, 16, 8, 128, True)),
        "llama3_8b": (_case(512, 512, 32, 8, 128, True), _case(2048, 2048, 32, 8, 128, True)),
    },
)

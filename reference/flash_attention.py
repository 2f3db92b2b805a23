"""Attention over dense keys and values: softmax(Q K^T * scale) V per head, optionally causal.

The tolerance, per element, with P the exact softmax weights, u_acc = 2**-24 for fp32 accumulation, u_P the unit
roundoff of the dtype in which P enters the second product and u_out that of the output:

    (u_P + expm1(2 * delta) + c * u_acc * (sqrt(S) + 1)) * (P @ |V|)  +  eta * sum_j |V_j|  +  u_out * |ref|
    delta = c * u_acc * sqrt(D) * scale * max_j (|Q| |K|^T)

A score is a sum of D products, so its error is about u_acc * sqrt(D) times the sum of their magnitudes: that is delta.
It moves a numerator exp(s) and the denominator sum exp(s) by a factor of at most e^delta each, hence e^(2 delta) - 1.
Rounding P costs u_P of each term, or eta, half the smallest subnormal, where P underflows (the row's largest
unnormalised P is 1, so its denominator is at least 1). The second product sums S terms, and the exponential itself is
good to a few u_acc. sqrt rather than the length: errors of signed sums add as a random walk; c = 4 covers its tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rooflab.reference.spec import DTYPE_NAMES, FP32_ROUNDOFF, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

WALK = 4.0
"""c of the tolerance: standard deviations of rounding's random walk that are allowed."""
TILE_EDGES = (0, 15, 16, 31, 32, 63, 64, 127, 128)
"""Positions at which pages and tiles of the usual sizes begin and end."""


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T * softmax_scale) v in fp64, head h of q reading head h // (H / H_kv) of k and v.

    q: (B, T, H, D); k, v: (B, S, H_kv, D); returns (B, T, H, D). `causal` is bottom-right aligned: query i sees keys
    j <= i + S - T, and a query that sees none gives 0. `softmax_scale` None is D**-0.5.
    """
    scale = get_scale(q, softmax_scale)
    visible = visible_keys(q.shape[1], k.shape[1], causal)
    return torch.stack([attend(*batch, visible, scale) for batch in zip(q, k, v, strict=True)])


def get_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """`softmax_scale`, or D**-0.5 for None."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale


def visible_keys(T: int, S: int, causal: bool) -> torch.Tensor:
    """How many keys, always a prefix, each of T queries sees among S: (T,) int64 on the CPU."""
    if not causal:
        return torch.full((T,), S)
    return (torch.arange(T) + S - T + 1).clamp(0, S)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """One sequence's attention in fp64.  q: (T, H, D); k, v: (S, H_kv, D); visible: (T,); returns (T, H, D)."""
    group = q.shape[1] // k.shape[1]
    heads = [
        _weights(q[:, h], k[:, h // group], visible, softmax_scale) @ v[:, h // group].double()
        for h in range(q.shape[1])
    ]
    return torch.stack(heads, dim=1)


def error_bound(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, softmax_scale: float, scheme: Scheme
) -> torch.Tensor:
    """Everything of the tolerance but u_out * |ref|, for one sequence.  Shapes as in `attend`."""
    S, D = k.shape[0], q.shape[-1]
    group = q.shape[1] // k.shape[1]
    eta = torch.finfo(scheme.activation).smallest_normal * torch.finfo(scheme.activation).eps / 2
    walk = WALK * FP32_ROUNDOFF
    unseen = torch.arange(S, device=q.device) >= visible.to(q.device)[:, None]
    heads = []
    for h in range(q.shape[1]):
        magnitude = v[:, h // group].double().abs()
        products = q[:, h].double().abs() @ k[:, h // group].double().abs().mT
        largest = products.masked_fill(unseen, 0.0).amax(-1, keepdim=True) if S else products.new_zeros(len(q), 1)
        delta = walk * math.sqrt(D) * abs(softmax_scale) * largest
        relative = scheme.unit_roundoff + torch.expm1(2 * delta) + walk * (math.sqrt(S) + 1)
        weights = _weights(q[:, h], k[:, h // group], visible, softmax_scale)
        heads.append(relative * (weights @ magnitude) + eta * ((~unseen).double() @ magnitude))
    return torch.stack(heads, dim=1)


def _weights(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Softmax weights of one head, (T, S) fp64; a row that sees no key is all 0."""
    if k.shape[0] == 0:
        return q.new_zeros((len(q), 0), dtype=torch.float64)
    scores = q.double() @ k.double().mT * softmax_scale
    unseen = torch.arange(k.shape[0], device=q.device) >= visible.to(q.device)[:, None]
    scores = scores.masked_fill(unseen, -math.inf)
    return torch.softmax(scores, dim=-1).masked_fill(visible.to(q.device)[:, None] == 0, 0.0)


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """The bound that the module derives, (B, T, H, D) fp64."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    scale = get_scale(q, inputs.get("softmax_scale"))
    visible = visible_keys(q.shape[1], k.shape[1], inputs.get("causal", False))
    bounds = [error_bound(*batch, visible, scale, scheme) for batch in zip(q, k, v, strict=True)]
    return (torch.stack(bounds) + scheme.unit_roundoff * oracle[0].abs(),)


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Normal q (B, T, H, D) and k, v (B, S, H_kv, D)."""
    B, T, S, H, H_kv, D = (int(case[key]) for key in ("B", "T", "S", "H", "H_kv", "D"))
    dtype = scheme.activation
    return {
        "q": randn(B, T, H, D, dtype=dtype, device=device, seed=seed),
        "k": randn(B, S, H_kv, D, dtype=dtype, device=device, seed=seed + 1),
        "v": randn(B, S, H_kv, D, dtype=dtype, device=device, seed=seed + 2),
        "causal": bool(case["causal"]),
    }


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """One dominant key at each tile edge, at the ends and on the causal diagonal; one past the end, which is poison."""
    T, S = int(case["T"]), int(case["S"])
    places = {j: f"key {j}" for j in (*TILE_EDGES, S // 2, S - 1) if 0 <= j < S}
    if case["causal"] and 0 <= S - T + T // 2 < S:
        places[S - T + T // 2] = f"diagonal of query {T // 2}"
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


def low_precision(inputs: Inputs, q: str, k: str, v: str) -> Iterator[tuple[str, Inputs]]:
    """Inputs on which 16-bit intermediates show: sums that do not cancel, and a large score that all keys share.

    `q`, `k` and `v` name the arguments. On random data the rounding of the weights to 16 bits hides both.
    """
    yield "values of one sign", inputs | {v: (1 + inputs[v].float().abs() / 8).to(inputs[v])}
    shared = {name: inputs[name].clone() for name in (q, k)}
    shared[q][..., 0] = 8.0
    shared[k][..., 0] = 3.0 * math.sqrt(shared[k].shape[-1])
    yield "a large score shared by all keys", inputs | shared


def listen(q: torch.Tensor, k: torch.Tensor) -> None:
    """Gives every query one direction in which no key has anything yet."""
    q[..., 0] = 8.0
    k[..., 0] = 0.0


def shout(k: torch.Tensor, v: torch.Tensor, where: tuple[slice | int, ...]) -> None:
    """Makes the key at `where` outweigh all others: a score of 24 above theirs, and a value that none of them has."""
    D = k.shape[-1]
    k[(*where, slice(None), 0)] = 3.0 * math.sqrt(D)
    v[where] = 8.0 * torch.linspace(-1, 1, D).to(v)


def cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Cost:
    """Two products over the visible pairs, one exponential each; queries that see no key are not read."""
    B, T, H, D = q.shape
    visible = visible_keys(T, k.shape[1], causal)
    pairs = B * H * int(visible.sum())
    read = nbytes(q) * int((visible > 0).sum()) / max(T, 1) + (nbytes(k, v) if pairs else 0)
    return attention_cost(pairs, D, q, read)


def attention_cost(pairs: int, head_dim: int, q: torch.Tensor, read_bytes: float) -> Cost:
    """Cost of attention over `pairs` visible (query, key) pairs, heads counted; the output has the shape of q."""
    return Cost(
        read_bytes=read_bytes,
        write_bytes=nbytes(q),
        tensor_flops={DTYPE_NAMES[q.dtype]: 4.0 * head_dim * pairs},
        vector_flops=3.0 * pairs,  # scale and shift in one multiply-add, and the sum of the denominator
        sfu_ops=float(pairs),
    )


def _case(T: int, S: int, H: int, H_kv: int, D: int, causal: bool, B: int = 1) -> Case:
    return Case(B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal)


SPEC = OpSpec(
    name="flash_attention",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out",),
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
        ),
        "smollm2_135m": (_case(512, 512, 9, 3, 64, True), _case(2048, 2048, 9, 3, 64, True)),
        "qwen3_0_6b": (_case(512, 512, 16, 8, 128, True), _case(2048, 2048, 16, 8, 128, True)),
        "llama3_8b": (_case(512, 512, 32, 8, 128, True), _case(2048, 2048, 32, 8, 128, True)),
    },
)

"""Computes `softmax(Q K^T * scale) @ V` per head over dense keys and values. `attention.py` explains options and
tolerance.

In fp8, q, k and v are e4m3, and the output is bf16. Each head of each sequence has its own scales. FlashAttention-3
(Shah et al., arXiv 2407.08608) has only one scale of q per KV head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from rooflab.reference.attention import (
    HEAD_AXES,
    OPTION_AXES,
    SINKS_ARGUMENT,
    TILE_EDGES,
    Scores,
    attend,
    attention_cost,
    error_bounds,
    get_scale,
    listen,
    low_precision,
    option_rules,
    other_scores,
    seen_keys,
    shout,
    together,
    with_heads,
)
from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims, Result, check_layout
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.rows import MIN_SCALE
from rooflab.reference.spec import DTYPE_NAMES, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

E4M3 = torch.float8_e4m3fn
OPERANDS = ("q", "k", "v")
"""The arguments that may have a scale; the scale of `q` is named `q_scale`."""


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
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Outputs:
    """Returns softmax(q k^T * softmax_scale) @ v in fp64. Head h of q uses head h // (H / H_kv) of k and v.

    q: (B, T, H, D); k, v: (B, S, H_kv, D). Returns (B, T, H, D), and with `return_lse` also the log-sum-exp (B, T, H).
    With `causal`, query i sees the keys j <= i + S - T. With `window`, it sees only the newest `window` of these keys.
    A query that sees no key gives 0. The default of `softmax_scale` is D**-0.5. sinks: (H,) fp32. q_scale: (B, H) fp32;
    k_scale, v_scale: (B, H_kv) fp32; all scales are positive."""
    CONTRACT.check(locals(), any_dtype=True)
    key_range = seen_keys(q.shape[1], k.shape[1], causal, window)
    scores = Scores(get_scale(q, softmax_scale), softcap)
    q, k, v = _scaled(q, q_scale), _scaled(k, k_scale), _scaled(v, v_scale)
    sequence_results = (attend(*sequence_qkv, key_range, scores, sinks) for sequence_qkv in zip(q, k, v, strict=True))
    out, lse = together(sequence_results, q, v.shape[-1])
    return (out, lse) if return_lse else out


def keys_contiguous(v: torch.Tensor) -> bool:
    """Returns whether v (B, S, H_kv, D) has stride 1 along the keys (S), as a view of (B, H_kv, D, S) has."""
    return v.stride(1) == 1 and v.stride(3) != 1


def _rules(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` on arguments that do not fit together. Two things are allowed only if q is e4m3: scales of q,
    k and v, and a v with stride 1 along the keys (S)."""
    option_rules(arguments, dims, "k")
    if arguments["q"].dtype != E4M3:
        check_layout("v", arguments["v"], "rows")
        for name in ("q_scale", "k_scale", "v_scale"):
            if arguments.get(name) is not None:
                expected_text = f"None, as q, k and v are {arguments['q'].dtype} and not {E4M3}"
                raise ValueError(f"{name}: expected {expected_text}, got a tensor")
    elif not keys_contiguous(arguments["v"]):
        check_layout("v", arguments["v"], "rows")


def _scaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Multiplies each head of `x` (B, T, H, D) by its scale. `scale` is (B, H), or None for no scaling."""
    return x if scale is None else x.double() * scale.double()[:, None, :, None]


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance as in `attention.py`, in fp64: (B, T, H, D), and (B, T, H) for a returned log-sum-exp."""
    q, k, v = (_scaled(inputs[name], inputs.get(f"{name}_scale")) for name in OPERANDS)
    key_range = seen_keys(q.shape[1], k.shape[1], inputs.get("causal", False), inputs.get("window"))
    scores = Scores(get_scale(q, inputs.get("softmax_scale")), inputs.get("softcap"))
    sinks = inputs.get("sinks")
    error_limits = (error_bounds(*seq_qkv, key_range, scores, scheme, sinks) for seq_qkv in zip(q, k, v, strict=True))
    out, lse = together(error_limits, q, v.shape[-1])
    return (out + scheme.unit_roundoff * oracle[0].abs(), lse)[: len(oracle)]


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random normal q (B, T, H, D) and k, v (B, S, H_kv, D), and the options of the test case.

    In fp8, each head is quantised with its own scale. In fp8 with `v_columns`, v is stored with S as the last axis,
    because Hopper's fp8 matrix instructions need this layout. NaN pads its rows to a multiple of 16 bytes."""
    return _quantised(_drawn(case, scheme, device, seed), scheme, case)


def _drawn(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random inputs in the activation dtype. For an fp8 scheme they are in fp32, because they are quantised
    later."""
    B, T, S, H, H_kv, D = (int(case[key]) for key in ("B", "T", "S", "H", "H_kv", "D"))
    dtype = torch.float32 if _is_fp8(scheme) else scheme.activation
    return {
        "q": randn(B, T, H, D, dtype=dtype, device=device, seed=seed),
        "k": randn(B, S, H_kv, D, dtype=dtype, device=device, seed=seed + 1),
        "v": randn(B, S, H_kv, D, dtype=dtype, device=device, seed=seed + 2),
        "causal": bool(case["causal"]),
        **options(case, H, device, seed + 3),
    }


def _is_fp8(scheme: Scheme) -> bool:
    return scheme.activation.itemsize == 1


def _quantised(inputs: Inputs, scheme: Scheme, case: Case) -> Inputs:
    """Quantises q, k and v to fp8 and adds their scales. If the scheme is not fp8, returns `inputs` unchanged."""
    if not _is_fp8(scheme):
        return inputs
    quantised_inputs = dict(inputs)
    for name in OPERANDS:
        quantised_inputs[name], quantised_inputs[f"{name}_scale"] = quantize_heads(inputs[name], scheme.activation)
    if case.get("v_columns"):
        quantised_inputs["v"] = _in_columns(quantised_inputs["v"])
    return quantised_inputs


def _in_columns(v: torch.Tensor) -> torch.Tensor:
    """Copies v (B, S, H_kv, D) to a layout with stride 1 along S. NaN pads each run of S values to a multiple of 16
    bytes."""
    S = v.shape[1]
    transposed_v = v.permute(0, 2, 3, 1).float().contiguous()
    padded_v = torch.nn.functional.pad(transposed_v, (0, -S % (16 // v.element_size())), value=math.nan)
    return padded_v.to(v.dtype)[..., :S].permute(0, 3, 1, 2)


def quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises x (B, T, H, D) to the fp8 type `dtype`. Returns codes and fp32 scales (B, H); x is about code * scale.

    A head of zeros has scale 1. A NaN stays NaN and does not change the scale of its head."""
    B, T, H, D = x.shape
    if x.device.type == "meta":  # on `meta` torch computes the division in Python
        return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(B, H, device=x.device)
    if not T:
        scale = torch.ones(B, H, dtype=torch.float32, device=x.device)
    else:
        head_max = x.float().abs().nan_to_num(nan=0.0).amax(dim=(1, 3))
        scale = torch.where(head_max > 0, (head_max / torch.finfo(dtype).max).clamp(min=MIN_SCALE), 1.0)
    dtype_max = torch.finfo(dtype).max
    return (x.float() / scale[:, None, :, None]).clamp(-dtype_max, dtype_max).to(dtype), scale


def options(case: Case, H: int, device: torch.device, seed: int) -> dict[str, Any]:
    """Returns the optional attention arguments that the test case sets."""
    case_options: dict[str, Any] = {}
    if case.get("window"):
        case_options["window"] = int(case["window"])
    if case.get("softcap"):
        case_options["softcap"] = float(case["softcap"])
    if case.get("sinks"):
        case_options["sinks"] = randn(H, dtype=torch.float32, device=device, seed=seed)
    if case.get("lse"):
        case_options["return_lse"] = True
    return case_options


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs with one dominant key, for example at a tile edge or on the causal diagonal. Other
    inputs have NaN just past the last key. In fp8, further inputs have queries near zero, or heads with magnitudes that
    differ by a factor of 1000."""
    T, S, window = int(case["T"]), int(case["S"]), int(case.get("window", 0))
    key_labels = {j: f"key {j}" for j in (*TILE_EDGES, S // 2, S - 1) if 0 <= j < S}
    middle = S - T + T // 2
    if case["causal"]:
        window_edges = {middle: "diagonal", middle - window + 1: "window's end", middle - window: "before the window"}
        edge_labels = window_edges.items() if window else [(middle, "diagonal")]
        key_labels |= {j: f"{input_label} of query {T // 2}" for j, input_label in edge_labels if 0 <= j < S}
    for j, input_label in sorted(key_labels.items()):
        yield input_label, _quantised(_with_a_shout(case, scheme, device, seed, j), scheme, case)
    if S:
        inputs = _drawn(case, scheme, device, seed)
        listen(inputs["q"], inputs["k"])
        for name in ("k", "v"):
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, 0, 0, 0, 0, 1))
        shout(inputs["k"], inputs["v"], (slice(None), S))
        inputs["v"][:, S] = math.nan
        inputs = _quantised(inputs, scheme, case)
        inputs |= {"k": inputs["k"][:, :S], "v": inputs["v"][:, :S]}
        yield "poison one past the last key", inputs
    base_inputs = _drawn(case, scheme, device, seed)
    for input_label, inputs in (*low_precision(base_inputs, "q", "k", "v"), *other_scores(base_inputs, "q", "k")):
        yield input_label, _quantised(inputs, scheme, case)
    if S and _is_fp8(scheme):
        # Scores near zero and values of one sign leave only the rounding of the weights, so that a wrong factor shows.
        inputs = _drawn(case, scheme, device, seed)
        inputs |= {"q": inputs["q"] / 1024, "v": inputs["v"].abs()}
        yield "queries near zero, values of one sign", _quantised(inputs, scheme, case)
        yield from _magnitudes(_quantised(_with_a_shout(case, scheme, device, seed, S // 2), scheme, case))


def _with_a_shout(case: Case, scheme: Scheme, device: torch.device, seed: int, key: int) -> Inputs:
    inputs = _drawn(case, scheme, device, seed)
    listen(inputs["q"], inputs["k"])
    shout(inputs["k"], inputs["v"], (slice(None), key))
    return inputs


def _magnitudes(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yields fp8 inputs in which every second head of q, or of k, is 1000 times smaller.

    In a large head one key gets all the weight. In a small head many keys share the weight. So a kernel that uses the
    scale of a wrong head gives a visibly wrong output."""
    q_scale, k_scale, v_scale = (inputs[f"{name}_scale"] for name in OPERANDS)
    new_scales = {"v_scale": v_scale * _alternating(v_scale)}
    yield "heads of q apart by 1000", inputs | new_scales | {"q_scale": q_scale * _alternating(q_scale)}
    yield "heads of k apart by 1000", inputs | new_scales | {"k_scale": k_scale * _alternating(k_scale)}


def _alternating(scale: torch.Tensor) -> torch.Tensor:
    """Returns factors in the shape of `scale` (B, H). The factors of neighbouring heads and sequences alternate between
    1 and 1/1000."""
    B, H = scale.shape
    b_plus_h = torch.arange(B, device=scale.device)[:, None] + torch.arange(H, device=scale.device)
    return torch.where(b_plus_h % 2 == 0, 1.0, 1e-3)


def cost(args: Arguments) -> Cost:
    """Returns the cost: two dot products and one exponential per visible (query, key) pair. Keys that no query sees,
    and queries that see no key, are not read."""
    (B, T, H, D), S = args.q.shape, args.k.shape[1]
    key_range = seen_keys(T, S, args.causal, args.window)
    key_counts = key_range.counts
    keys_read = int(key_range.end.max() - key_range.first.min()) if int(key_counts.sum()) else 0
    read_bytes = nbytes(args.q) * int((key_counts > 0).sum()) / max(T, 1) + nbytes(args.k, args.v) * keys_read / max(
        S, 1
    )
    return attention_cost(
        B * H * int(key_counts.sum()),
        D,
        args.q,
        read_bytes + nbytes(args.sinks, args.q_scale, args.k_scale, args.v_scale),
        lse_rows=B * T * H if args.return_lse else 0,
    )


def _case(T: int, S: int, H: int, H_kv: int, D: int, causal: bool, B: int = 1, **more: bool | int | float) -> Case:
    return Case(B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal, **more)


CONTRACT = Contract(
    {
        "q": Argument("B T H D", (*FLOATS, E4M3)),
        "k": Argument("B S H_kv D", "q"),
        "v": Argument("B S H_kv D", "q", layout="any"),
        "sinks": SINKS_ARGUMENT,
        "q_scale": Argument("B H", (torch.float32,), layout="any", optional=True),
        "k_scale": Argument("B H_kv", (torch.float32,), layout="any", optional=True),
        "v_scale": Argument("B H_kv", (torch.float32,), layout="any", optional=True),
    },
    {
        "out": Result(
            "B T H D", lambda arguments: torch.bfloat16 if arguments["q"].dtype == E4M3 else arguments["q"].dtype
        ),
        "lse": Result("B T H", torch.float32, when="return_lse", layout="any"),
    },
    _rules,
    scheme=lambda arguments: "fp8_e4m3" if arguments["q"].dtype == E4M3 else DTYPE_NAMES[arguments["q"].dtype],
    case=lambda arguments: {"v_columns": True} if keys_contiguous(arguments["v"]) else {},
)
SPEC = OpSpec(
    name="flash_attention",
    reference=reference,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "lse"),
    output_dtypes={"lse": torch.float32},
    optional={"window": 0, "softcap": 0.0, "sinks": False, "lse": False, "v_columns": False},
    schemes=("fp32", "fp16", "bf16", "fp8_e4m3"),
    wrong={
        "a key too few": lambda of: {"k": of.k[:, :-1], "v": of.v[:, :-1]},
        "a key too many": lambda of: {name: torch.cat((x, x[:, -1:]), 1) for name, x in (("k", of.k), ("v", of.v))},
        "the diagonal from the first key": lambda of: {"k": of.k[:, : of.q.shape[1]], "v": of.v[:, : of.q.shape[1]]},
        "the window is a key wider": lambda of: {"window": of.window and of.window + 1},
        "the scale is 1% off": lambda of: {"softmax_scale": 1.01 * get_scale(of.q, of.softmax_scale)},
    },
    tolerance=tolerance,
    planted=planted,
    cases={
        "smoke": (_case(48, 48, 4, 2, 64, True), _case(33, 80, 3, 1, 64, False, B=2), _case(20, 70, 4, 4, 128, True)),
        "edge": (
            _case(1, 1, 1, 1, 64, True),
            _case(1, 129, 8, 1, 64, True),
            _case(70, 17, 3, 1, 64, True),
            _case(63, 64, 4, 1, 128, True),
            _case(65, 65, 9, 3, 64, True),
            _case(128, 128, 2, 1, 128, True),
            _case(127, 129, 1, 1, 64, False),
            _case(16, 16, 2, 2, 64, True, B=3),
            _case(70, 65, 3, 1, 64, True, lse=True),
            _case(5, 0, 2, 1, 64, True, lse=True),
            _case(33, 70, 7, 1, 64, True, window=17),
            _case(130, 129, 2, 2, 64, True, window=64, lse=True),
            _case(65, 130, 4, 2, 128, True, softcap=30.0),
            _case(66, 64, 16, 1, 64, True, sinks=True, lse=True),
            _case(40, 150, 8, 2, 64, True, window=32, softcap=20.0, sinks=True, lse=True),
            _case(33, 47, 2, 1, 80, True),
            _case(64, 100, 2, 1, 64, True),  # whole tiles of queries, whose diagonal does not begin at key 0
            _case(33, 47, 2, 1, 96, False),
            _case(20, 129, 2, 1, 192, True),
            _case(20, 65, 2, 2, 256, True),
            _case(70, 130, 4, 2, 64, True, B=2, window=50, sinks=True, lse=True, v_columns=True),
        ),
        "smollm2_135m": (_case(512, 512, 9, 3, 64, True), _case(2048, 2048, 9, 3, 64, True)),
        "qwen3_0_6b": (_case(512, 512, 16, 8, 128, True), _case(2048, 2048, 16, 8, 128, True)),
        "llama3_8b": (_case(512, 512, 32, 8, 128, True), _case(2048, 2048, 32, 8, 128, True)),
    },
    domain=Domain(
        {
            "B": Sizes(1, 9, empty=True),
            "equal": (True, False),
            "T": Sizes(1, 2_500, empty=True),
            "S": Sizes(1, 2_500, empty=True),
            **HEAD_AXES,
            "causal": (True, False),
            **OPTION_AXES,
            "v_columns": (False, True),
        },
        with_heads,
    ),
)

"""Families of flashinfer-bench definitions that an op of ours computes.

A family is known by what a definition takes, not by its name.  Where the name alone says something (`causal`, `neox`),
a definition that does not say it is not mapped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rooflab.bench.exchange import flashinfer_attention as attention
from rooflab.bench.exchange.flashinfer_files import Definition
from rooflab.bench.exchange.flashinfer_forms import Family, Given, Sizes
from rooflab.reference.rope import THETA
from rooflab.reference.spec import Case, Inputs


def find_family(definition: Definition) -> tuple[Family | None, str]:
    """The family of a definition, or None and why it has none."""
    of_type = [family for family in FAMILIES if definition.op_type.startswith(family.op_types)]
    if not of_type:
        return None, f"no op here computes {definition.op_type!r}"
    fitting = [family for family in of_type if family.fits(definition)]
    if not fitting:
        wanted = " or ".join(dict.fromkeys(", ".join(sorted(family.needs)) for family in of_type))
        return None, f"its inputs are {', '.join(definition.inputs)}, and an op here takes {wanted}"
    reason = fitting[0].why_not(definition)
    return (None, reason) if reason else (fitting[0], "")


def _gemm(definition: Definition, given: Given) -> list[Inputs]:
    return [{"a": given["A"], "b": given["B"].mT if _transposed(definition) else given["B"], "bias": None}]


def _transposed(definition: Definition) -> bool:
    a, b = (definition.inputs[name].shape or () for name in ("A", "B"))
    return a[1] == b[1]


def _refuses_gemm(definition: Definition) -> str:
    a, b = (definition.inputs[name].shape or () for name in ("A", "B"))
    return "" if a[1] in b else f"A {list(a)} and B {list(b)} share no axis to sum over"


def _gemm_case(definition: Definition, axes: Mapping[str, int]) -> Case:
    (M, K), b = definition.shape("A", axes) or (), definition.shape("B", axes) or ()
    transposed = _transposed(definition)
    return Case(M=M, N=b[0] if transposed else b[1], K=K, layout="NT" if transposed else "NN", bias=False)


def get_eps(definition: Definition, given: Given | None = None) -> float | None:
    """A norm's epsilon: an input, or the number that the reference's text assigns to `eps`; None where neither is."""
    if given is not None and "eps" in given:
        return float(given["eps"])
    return definition.constant("eps", "epsilon", "variance_epsilon")


def _refuses_norm(definition: Definition) -> str:
    if "gemma" in definition.name:
        return "Gemma's norm adds one to the weight; rmsnorm here does not"
    known = "eps" in definition.inputs or get_eps(definition) is not None
    return "" if known else "neither its inputs nor its reference name one epsilon"


def _rmsnorm(definition: Definition, given: Given) -> list[Inputs]:
    return [{"x": given["hidden_states"], "weight": given["weight"], "eps": get_eps(definition, given)}]


def _fused_add_rmsnorm(definition: Definition, given: Given) -> list[Inputs]:
    arguments = _rmsnorm(definition, given)[0]
    return [{"x": arguments["x"], "residual": given["residual"], "weight": given["weight"], "eps": arguments["eps"]}]


def _norm_case(definition: Definition, axes: Mapping[str, int]) -> Case | None:
    eps = get_eps(definition)
    T, H = next(shape for name in definition.inputs if len(shape := definition.shape(name, axes) or ()) == 2)
    return None if eps is None else Case(T=T, H=H, eps=eps)


def _silu_and_mul(definition: Definition, given: Given) -> list[Inputs]:
    return [{"x": given["input"]}]


def _refuses_activation(definition: Definition) -> str:
    return "" if definition.name.startswith("silu_and_mul") else f"{definition.name} is not silu_and_mul"


def _rope(definition: Definition, given: Given) -> list[Inputs]:
    cos, sin = (half.contiguous() for half in given["cos_sin_cache"].chunk(2, dim=-1))
    pairs = {"positions": given["positions"], "interleaved": "gptj" in definition.name}
    return [{"q": given["q"], "k": given["k"], "cos": cos, "sin": sin, **pairs}]


def _refuses_rope(definition: Definition) -> str:
    if ("gptj" in definition.name) == ("neox" in definition.name):
        return "its name says neither neox nor gptj, which pair different elements"
    table, q = (definition.inputs[name].shape or ("",) for name in ("cos_sin_cache", "q"))
    whole = table[-1] == q[-1] or definition.constants.get(table[-1]) == definition.constants.get(q[-1], -1)
    return "" if whole else "it turns a part of each head; rope here turns all of it"


def _random_rope(definition: Definition, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    rows, width = sizes["cos_sin_cache"]
    frequencies = THETA ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies  # (rows, width / 2)
    positions = torch.randint(0, max(rows, 1), sizes["positions"], generator=generator)
    return {"cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=-1).float(), "positions": positions}


def _sample(definition: Definition, given: Given) -> list[Inputs]:
    """Logarithms of the probabilities as logits, and every filter that the definition has not got off."""
    probs = given["probs"]
    rows, place = probs.shape[0], probs.device
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    dtypes = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    settings = {
        name: torch.as_tensor(given.get(name, value), device=place).to(dtypes[name]).expand(rows).contiguous()
        for name, value in off.items()
    }
    settings["top_k"] = settings["top_k"].clamp(max=probs.shape[1])
    return [
        {
            "logits": probs.log(),
            "temperature": torch.ones(rows, device=place),
            **settings,
            "seed": torch.arange(rows, device=place) * 7919 + 1,
            "position": torch.arange(rows, device=place),
        }
    ]


def _random_probs(definition: Definition, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    rows, vocabulary = sizes["probs"]
    found = {"probs": torch.randn(rows, vocabulary, generator=generator).softmax(dim=-1)}
    if "top_k" in sizes:
        found["top_k"] = torch.randint(1, vocabulary + 1, sizes["top_k"], generator=generator)
    for name, low in (("top_p", 0.1), ("min_p", 0.0)):
        if name in sizes:
            found[name] = torch.rand(sizes[name], generator=generator) * 0.9 + low
    return found


NORM_NAMES = {"input": "hidden_states", "x": "hidden_states"}
PAGES = {"q": 3, "k_cache": 4, "v_cache": 4, "kv_indptr": 1, "kv_indices": 1, "sm_scale": 0}
FAMILIES = (
    Family("gemm", "gemm", ("gemm",), {"A": 2, "B": 2}, _gemm, refuses=_refuses_gemm, case=_gemm_case),
    Family(
        "rmsnorm",
        "rmsnorm",
        ("rmsnorm", "norm"),
        {"hidden_states": 2, "weight": 1},
        _rmsnorm,
        may_have={"eps": 0},
        refuses=_refuses_norm,
        case=_norm_case,
        aliases=NORM_NAMES,
    ),
    Family(
        "fused_add_rmsnorm",
        "fused_add_rmsnorm",
        ("rmsnorm", "norm", "fused_add_rmsnorm"),
        {"hidden_states": 2, "residual": 2, "weight": 1},
        _fused_add_rmsnorm,
        outputs=2,
        may_have={"eps": 0},
        refuses=_refuses_norm,
        case=_norm_case,
        # Its reference norms the sum before that is rounded, ours after: one roundoff of the element, one of the norm.
        slack=2.0,
        aliases=NORM_NAMES,
    ),
    Family(
        "silu_and_mul",
        "silu_and_mul",
        ("activation", "silu_and_mul"),
        {"input": 2},
        _silu_and_mul,
        refuses=_refuses_activation,
    ),
    Family(
        "rope",
        "rope",
        ("rope",),
        {"q": 3, "k": 3, "cos_sin_cache": 2, "positions": 1},
        _rope,
        outputs=2,
        refuses=_refuses_rope,
        random=_random_rope,
    ),
    Family(
        "paged decode",
        "paged_attention",
        ("gqa_paged",),
        PAGES,
        attention.paged,
        may_have={"kv_last_page_len": 1},
        refuses=attention.refuses_paged,
        random=attention.random_batch,
    ),
    Family(
        "paged prefill",
        "paged_attention",
        ("gqa_paged",),
        {**PAGES, "qo_indptr": 1},
        attention.paged,
        may_have={"kv_last_page_len": 1},
        refuses=attention.refuses_paged,
        random=attention.random_batch,
    ),
    Family(
        "ragged prefill",
        "flash_attention",
        ("gqa_ragged",),
        {"q": 3, "k": 3, "v": 3, "qo_indptr": 1, "kv_indptr": 1, "sm_scale": 0},
        attention.ragged,
        join=attention.join_sequences,
        refuses=attention.refuses_prefill,
        random=attention.random_batch,
    ),
    Family(
        "sampling",
        "sample",
        ("sampling",),
        {"probs": 2},
        _sample,
        may_have={"top_k": 1, "top_p": 1, "min_p": 1},
        random=_random_probs,
        drawn=True,
    ),
)
"""In the order in which they are tried."""

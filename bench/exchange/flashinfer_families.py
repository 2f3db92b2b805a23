"""Families of flashinfer-bench definitions that an op of ours computes, and their inputs as our arguments.

A family is known by what a definition takes, not by its name.  Where the name alone says something (`causal`, `neox`),
a definition that does not say it is not mapped.  In the attention families, a batch of theirs is one list with offsets:
`kv_indptr` bounds each sequence's entries of `kv_indices`, which name its pages, and `qo_indptr` its queries.  Here, a
table has a row of pages for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from rooflab.bench.exchange.flashinfer_files import DTYPES, Definition
from rooflab.reference.rope import THETA
from rooflab.reference.spec import DTYPE_NAMES, Case, Inputs, Outputs

Given = Mapping[str, Any]
"""A definition's inputs by name: tensors, and scalars of Python."""
Sizes = Mapping[str, tuple[int, ...]]
"""Shapes of a definition's tensors by name."""


def _only_one(parts: list[Outputs]) -> Outputs:
    return parts[0]


def _accepts(definition: Definition) -> str:
    return ""


def _nothing(definition: Definition, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {}


@dataclass(frozen=True)
class Family:
    """Definitions of one form, and how their arguments become those of an op of ours."""

    name: str
    op: str
    op_types: tuple[str, ...]
    """Beginnings of `op_type`."""
    needs: Mapping[str, int]
    """Inputs that it has, each with its number of axes; 0 for a scalar of Python."""
    calls: Callable[[Definition, Given], list[Inputs]]
    """Our op's arguments: for one call, or for one per sequence."""
    outputs: int = 1
    """How many of the definition's first outputs ours stand for, in the order of ours; others are not compared.  A
    definition may have fewer."""
    may_have: Mapping[str, int] = field(default_factory=dict)
    """Inputs that it can have besides."""
    join: Callable[[list[Outputs]], Outputs] = _only_one
    """What each call gave, as the definition's outputs."""
    refuses: Callable[[Definition], str] = _accepts
    """Why a definition of this form is not mapped, or nothing."""
    random: Callable[[Definition, Sizes, torch.Generator], dict[str, torch.Tensor]] = _nothing
    """Inputs that a workload leaves to chance and that must mean something: offsets, probabilities, angles."""
    case: Callable[[Definition, Mapping[str, int]], Case | None] | None = None
    """The case of ours that a workload's sizes are, where they are one."""
    drawn: bool = False
    """Whether the outputs are draws, so that only their distribution can be compared."""
    slack: float = 0.0
    """Unit roundoffs of the value that outputs may differ by besides: where a definition rounds elsewhere than ours."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Our name here of an input, by its name in some definitions."""

    def given(self, inputs: Given) -> dict[str, Any]:
        """A definition's inputs under the names used here."""
        return {self.aliases.get(name, name): value for name, value in inputs.items()}

    def fits(self, definition: Definition) -> bool:
        """Whether a definition has these inputs."""
        names = {self.aliases.get(name, name) for name in definition.inputs}
        return self.needs.keys() <= names <= self.needs.keys() | self.may_have.keys()

    def why_not(self, definition: Definition) -> str:
        """Why a definition that has these inputs is not mapped, or nothing."""
        for name, tensor in definition.inputs.items():
            wanted = {**self.needs, **self.may_have}[self.aliases.get(name, name)]
            if len(tensor.shape or ()) != wanted:
                return f"{name} has {len(tensor.shape or ())} axes; an op here takes {wanted}"
        return scheme_of(definition)[1] or self.refuses(definition)


ASIDE = frozenset({"lse", "cos_sin_cache", "top_p", "min_p", "eps"})
"""Small fp32 companions that do not decide a definition's scheme."""


def scheme_of(definition: Definition) -> tuple[str, str]:
    """The scheme of a definition, or nothing and why it has none: one float dtype over all its tensors."""
    tensors = {**definition.inputs, **definition.outputs}
    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if unknown:
        return "", f"{unknown[0]} is of the dtype {tensors[unknown[0]].dtype!r}"
    found = {
        tensor.dtype
        for name, tensor in tensors.items()
        if tensor.shape is not None and name not in ASIDE and DTYPES[tensor.dtype].is_floating_point
    }
    names = [name for dtype, name in DTYPE_NAMES.items() if found == {str(dtype).removeprefix("torch.")}]
    return (names[0], "") if names else ("", f"its dtypes are {', '.join(sorted(found))}, which no scheme here has")


def lengths_of(offsets: torch.Tensor) -> list[int]:
    """Entries between successive offsets.  Raises `ValueError` where they fall or do not begin at 0."""
    values = offsets.tolist()
    counts = [end - begin for begin, end in pairwise(values)]
    if not values or values[0] != 0 or min(counts, default=0) < 0:
        raise ValueError(f"offsets: expected a rising list from 0, got {values[:8]}")
    return counts


def paged(definition: Definition, given: Given) -> list[Inputs]:
    """`paged_attention`'s arguments.  Raises `ValueError` on pages that the cache has not got."""
    counts = lengths_of(given["kv_indptr"])
    indices = given["kv_indices"].cpu()
    num_pages, page_size = given["k_cache"].shape[:2]
    used = indices[: sum(counts)]
    if len(used) < sum(counts) or (len(used) and not 0 <= int(used.min()) <= int(used.max()) < num_pages):
        raise ValueError(f"kv_indices: expected {sum(counts)} pages below {num_pages}, got others")
    table = torch.full((len(counts), max([1, *counts])), -1, dtype=torch.int32)
    for row, count, pages in zip(table, counts, used.split(counts), strict=True):
        row[:count] = pages
    filled = given["kv_last_page_len"].tolist() if "kv_last_page_len" in given else [1] * len(counts)
    lengths = [(count - 1) * page_size + last if count else 0 for count, last in zip(counts, filled, strict=True)]
    place = given["q"].device
    arguments = {
        "q": given["q"],
        "k_cache": given["k_cache"],
        "v_cache": given["v_cache"],
        "block_table": table.to(place),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=place),
        "softmax_scale": float(given["sm_scale"]),
    }
    if "qo_indptr" in given:
        arguments["cu_seqlens_q"] = given["qo_indptr"].to(torch.int32)
    return [arguments]


def refuses_paged(definition: Definition) -> str:
    """Why a paged definition is not mapped, or nothing."""
    if "kv_last_page_len" not in definition.inputs and definition.constants.get("page_size") != 1:
        return "pages of more than one token, and no kv_last_page_len says how full the last one is"
    return refuses_prefill(definition) if "qo_indptr" in definition.inputs else ""


def refuses_prefill(definition: Definition) -> str:
    """Why a prefill definition is not mapped, or nothing."""
    return "" if "causal" in definition.name else "its name does not say that it is causal, and its inputs cannot"


def ragged(definition: Definition, given: Given) -> list[Inputs]:
    """`flash_attention`'s arguments, a call for each sequence that has queries, causal and bottom-right aligned."""
    queries, keys = lengths_of(given["qo_indptr"]), lengths_of(given["kv_indptr"])
    parts = zip(given["q"].split(queries), given["k"].split(keys), given["v"].split(keys), strict=True)
    shared = {"causal": True, "softmax_scale": float(given["sm_scale"])}
    return [{"q": q[None], "k": k[None], "v": v[None], **shared} for q, k, v in parts if len(q)]


def join_sequences(parts: list[Outputs]) -> Outputs:
    """The outputs of `ragged`'s calls as one list of tokens, (T, H, D)."""
    return (torch.cat([part[0].squeeze(0) for part in parts]),)


def random_batch(definition: Definition, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Offsets, pages and lengths that fit together, for those of them that a workload leaves to chance."""
    found: dict[str, torch.Tensor] = {}
    for name, items in (("qo_indptr", "q"), ("kv_indptr", "kv_indices" if "kv_indices" in sizes else "k")):
        if name in sizes:
            found[name] = _offsets(sizes[items][0], sizes[name][0] - 1, generator)
    if "kv_indices" in sizes:
        count, pages = sizes["kv_indices"][0], sizes["k_cache"][0]
        order = torch.randperm(pages, generator=generator)
        found["kv_indices"] = order[torch.arange(count) % max(pages, 1)].to(torch.int32)
    if "kv_last_page_len" in sizes:
        page_size = sizes["k_cache"][1]
        filled = torch.randint(1, page_size + 1, sizes["kv_last_page_len"], generator=generator)
        found["kv_last_page_len"] = filled.to(torch.int32)
    return found


def _offsets(total: int, parts: int, generator: torch.Generator) -> torch.Tensor:
    """`total` items cut into `parts`, none of them empty where there are enough."""
    if total >= parts > 0:
        cuts = torch.randperm(total - 1, generator=generator)[: parts - 1] + 1
    else:
        cuts = torch.randint(0, total + 1, (max(parts - 1, 0),), generator=generator)
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([total])]).to(torch.int32)


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
        paged,
        may_have={"kv_last_page_len": 1},
        refuses=refuses_paged,
        random=random_batch,
    ),
    Family(
        "paged prefill",
        "paged_attention",
        ("gqa_paged",),
        {**PAGES, "qo_indptr": 1},
        paged,
        may_have={"kv_last_page_len": 1},
        refuses=refuses_paged,
        random=random_batch,
    ),
    Family(
        "ragged prefill",
        "flash_attention",
        ("gqa_ragged",),
        {"q": 3, "k": 3, "v": 3, "qo_indptr": 1, "kv_indptr": 1, "sm_scale": 0},
        ragged,
        join=join_sequences,
        refuses=refuses_prefill,
        random=random_batch,
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

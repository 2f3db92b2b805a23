"""embedding: copies one row of the embedding table for each token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rooflab.reference.compare import exact
from rooflab.reference.contract import FLOATS, Argument, Contract, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.rules import check_shape, check_values
from rooflab.reference.spec import DTYPE_NAMES, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns weight[token_ids].  token_ids: (T,) int64; weight: (V, H); returns (T, H)."""
    check_shape("token_ids", token_ids, None)
    check_shape("weight", weight, None, None)
    check_values("token_ids", token_ids, 0, len(weight) - 1)
    return weight[token_ids]


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes uniform random token ids and a random table. On the device `meta`, the ids are an ordinary CPU tensor."""
    T, V, H = int(case["T"]), int(case["V"]), int(case["H"])
    token_ids = torch.randint(V, (T,), generator=torch.Generator().manual_seed(seed))
    weight = randn(V, H, dtype=scheme.weight, device=device, seed=seed + 1)
    return {"token_ids": token_ids if weight.is_meta else token_ids.to(device), "weight": weight}


def cost(args: Arguments) -> Cost:
    """Returns the cost: the op reads each distinct row once, and writes one row per token."""
    token_id_list, row_bytes = args.token_ids.tolist(), args.weight.shape[1] * args.weight.element_size()
    return Cost(nbytes(args.token_ids) + len(set(token_id_list)) * row_bytes, len(token_id_list) * row_bytes)


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns a tolerance of zero, because the op copies rows and computes nothing."""
    return (exact(oracle[0]),)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs. First, tokens ask for the first row, then for the last row, then all for the same row.
    Finally, the rows that no token asks for are infinite or NaN."""
    V = int(case["V"])
    for row_label, token_id in (("first row", 0), ("last row", V - 1)):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["token_ids"][:1] = token_id
        inputs["token_ids"][-1:] = token_id
        yield row_label, inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["token_ids"].fill_(V // 2)
    yield "one row for all", inputs
    for row_label, unused_value in (("infinite", math.inf), ("NaN", math.nan)):
        inputs = make_inputs(case, scheme, device, seed)
        unused_mask = torch.ones(V, dtype=torch.bool, device=inputs["weight"].device)
        unused_mask[inputs["token_ids"].long()] = False
        inputs["weight"][unused_mask] = unused_value
        yield f"{row_label} rows that no token asks for", inputs


def _cases(V: int, H: int, *T_values: int) -> tuple[Case, ...]:
    return tuple(Case(T=T, V=V, H=H) for T in T_values)


CONTRACT = Contract(
    {"token_ids": Argument("T", (torch.int64,)), "weight": Argument("V H", FLOATS)},
    {"out": Result("T H", "weight")},
    values=lambda arguments, dims: check_values("token_ids", arguments["token_ids"], 0, dims["V"] - 1),
    scheme=lambda arguments: DTYPE_NAMES[arguments["weight"].dtype],
)
SPEC = OpSpec(
    name="embedding",
    reference=embedding,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out",),
    cases={
        "smoke": _cases(100, 64, 8),
        "edge": (
            Case(T=1, V=1, H=1),
            Case(T=1, V=7, H=576),
            Case(T=5, V=1000, H=33),
            Case(T=3, V=3, H=1025),
            Case(T=33, V=50, H=16),
        ),
        "smollm2_135m": _cases(49152, 576, 1, 16, 512),
        "qwen3_0_6b": _cases(151936, 1024, 1, 16, 512),
        "llama3_8b": _cases(128256, 4096, 1, 16, 2048),
    },
    wrong={
        "the next row of the table": lambda of: {"token_ids": (of.token_ids + 1) % len(of.weight)},
        "the first token's row for all": lambda of: {"token_ids": of.token_ids[:1].expand_as(of.token_ids)},
    },
    tolerance=tolerance,
    planted=planted,
    domain=Domain(
        {
            "T": Sizes(1, 5_000, empty=True),
            "V": Sizes(1, 300_000, model="vocab"),
            "H": Sizes(1, 70_000, model="hidden"),
        },
        Case,
    ),
)

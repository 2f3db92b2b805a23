"""kv_cache_write: writes new keys and values to their slots in the paged KV cache.

For the pages see Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.compare import exact
from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.pages import drawn_pages
from rooflab.reference.rules import check_slots
from rooflab.reference.spec import Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def kv_cache_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the new k_cache and v_cache, with token t in slot slot_mapping[t]. A token with slot -1 is skipped.

    k, v: (T, H_kv, D); k_cache, v_cache: (num_blocks, block_size, H_kv, D). slot_mapping: (T,) int64; a slot is block *
    block_size + offset, and occurs at most once."""
    arguments = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    slots_exist(arguments, CONTRACT.check(arguments))
    block_size = k_cache.shape[1]
    new_k, new_v = k_cache.clone(), v_cache.clone()
    for token_index, slot_id in enumerate(slot_mapping.tolist()):
        if slot_id >= 0:
            new_k[slot_id // block_size, slot_id % block_size] = k[token_index]
            new_v[slot_id // block_size, slot_id % block_size] = v[token_index]
    return new_k, new_v


def slots_exist(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if a slot does not exist, or if two tokens have the same slot. -1 means no slot."""
    check_slots(arguments["slot_mapping"], dims["num_blocks"] * dims["block_size"])


NEW_ARGUMENT, CACHE = Argument("T H_kv D", "k"), Argument("num_blocks block_size H_kv D", "k", "contiguous")
CONTRACT = Contract(
    {
        "k": Argument("T H_kv D", FLOATS),
        "v": NEW_ARGUMENT,
        "k_cache": CACHE,
        "v_cache": CACHE,
        "slot_mapping": Argument("T", (torch.int64,)),
    },
    {},
    values=slots_exist,
)


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random k and v, caches with other random values, and distinct random slots. `skipped` tokens have slot -1.

    On the device `meta`, the slots are an ordinary CPU tensor. Raises `ValueError` if the cache has too few slots."""
    T, H_kv, D = int(case["T"]), int(case["H_kv"]), int(case["D"])
    num_blocks, block_size, skipped_tokens = int(case["num_blocks"]), int(case["block_size"]), int(case["skipped"])
    if T > num_blocks * block_size or skipped_tokens > T:
        raise ValueError(f"case: expected skipped <= T <= num_blocks * block_size, got {case.id}")
    slot_ids = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(seed))[:T].clone()
    # Skipped tokens are spread over the batch, so that a kernel that stops at the first -1 fails.
    slot_ids[torch.arange(skipped_tokens) * max(T // max(skipped_tokens, 1), 1)] = -1
    cache_shape = (num_blocks, block_size, H_kv, D)
    k = randn(T, H_kv, D, dtype=scheme.activation, device=device, seed=seed + 1)
    return {
        "k": k,
        "v": randn(T, H_kv, D, dtype=scheme.activation, device=device, seed=seed + 2),
        "k_cache": randn(*cache_shape, dtype=scheme.activation, device=device, seed=seed + 3),
        "v_cache": randn(*cache_shape, dtype=scheme.activation, device=device, seed=seed + 4),
        "slot_mapping": slot_ids if k.is_meta else slot_ids.to(device),
    }


def cost(args: Arguments) -> Cost:
    """Returns the cost: slot_mapping is read, and the key and value of each token with a slot are read and written."""
    write_count = int((args.slot_mapping >= 0).sum())
    row_bytes = args.k.shape[1] * args.k.shape[2] * (args.k.element_size() + args.v.element_size())
    return Cost(read_bytes=nbytes(args.slot_mapping) + write_count * row_bytes, write_bytes=write_count * row_bytes)


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns a tolerance of zero: the op copies rows and computes nothing. All other slots keep their values."""
    return exact(oracle[0]), exact(oracle[1])


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs. The first token or the last token goes to the first or the last slot of a page, in the
    first or the last page. Also yields tokens that all have the slot -1."""
    T, num_blocks, block_size = (int(case[key]) for key in ("T", "num_blocks", "block_size"))
    last_block_start = (num_blocks - 1) * block_size
    for slot_id in sorted({0, block_size - 1, last_block_start, last_block_start + block_size - 1}):
        for token_index in sorted({0, T - 1}) if T else ():
            inputs = make_inputs(case, scheme, device, seed)
            slot_ids = inputs["slot_mapping"]
            slot_ids[slot_ids == slot_id] = -1  # each slot at most once
            slot_ids[token_index] = slot_id
            yield f"token {token_index} to slot {slot_id}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["slot_mapping"].fill_(-1)
    yield "all skipped", inputs


def _cases(H_kv: int, D: int, *T_values: int) -> tuple[Case, ...]:
    return tuple(Case(T=T, H_kv=H_kv, D=D, num_blocks=256, block_size=16, skipped=0) for T in T_values)


SPEC = OpSpec(
    name="kv_cache_write",
    reference=kv_cache_write,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("k_cache", "v_cache"),
    cases={
        "smoke": (Case(T=8, H_kv=2, D=64, num_blocks=4, block_size=16, skipped=2),),
        "edge": (
            Case(T=1, H_kv=1, D=1, num_blocks=1, block_size=1, skipped=0),
            Case(T=1, H_kv=3, D=64, num_blocks=2, block_size=16, skipped=1),
            Case(T=13, H_kv=3, D=80, num_blocks=5, block_size=3, skipped=4),
            Case(T=33, H_kv=1, D=33, num_blocks=33, block_size=1, skipped=0),
            Case(T=5, H_kv=1, D=8, num_blocks=70_000, block_size=1, skipped=1),
        ),
        "smollm2_135m": _cases(3, 64, 1, 16, 512),
        "qwen3_0_6b": _cases(8, 128, 1, 16, 512),
        "llama3_8b": _cases(8, 128, 1, 16, 2048),
    },
    wrong={
        "keys and values in each other's cache": lambda of: {"k": of.v, "v": of.k},
        "the next slot": lambda of: {"slot_mapping": of.slot_mapping.roll(1)},
        "nothing behind the first skipped token": lambda of: {
            "slot_mapping": of.slot_mapping.masked_fill((of.slot_mapping < 0).cumsum(0) > 0, -1)
        },
    },
    tolerance=tolerance,
    planted=planted,
    mutates=("k_cache", "v_cache"),
    slots=("slot_mapping", "k_cache", "v_cache"),
    no_library="no paged cache; index assignment is the naive kernel",
    domain=Domain(
        {
            "T": Sizes(1, 5_000, empty=True),
            "H_kv": Sizes(1, 16, model="kv_heads"),
            "D": Sizes(1, 600, model="head_dim"),
            "block_size": Sizes(1, 300),
            "spare": (0, 1, 5_000),
            "skipped": ("none", "some", "all"),
        },
        drawn_pages,
    ),
)

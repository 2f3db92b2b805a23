"""Attention of flashinfer-bench definitions in our ops' arguments, and sizes that fit together where they are random.

There, a batch is one list with offsets: `kv_indptr` bounds each sequence's entries of `kv_indices`, which name its
pages, and `qo_indptr` its queries.  Here, a table has a row of pages per sequence.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from rooflab.bench.exchange.flashinfer_files import Definition
from rooflab.bench.exchange.flashinfer_forms import Given, Sizes
from rooflab.reference.spec import Inputs, Outputs


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

"""Makes adversarial inputs for any op, from its contract: rows of zeros with both signs, and a row of NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rooflab.reference.contract import Contract


def common_sets(contract: Contract, inputs: Mapping[str, Any], product: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields inputs with rows of zeros, and with one row of NaN, if the op's contract allows these rows.

    16-bit inputs of a matrix product (`product`) get no row of NaN: oneDNN's bf16 product then also gives NaN in the
    previous row."""
    rows = rows_of(contract, inputs)
    for label, change in (("every second row zeros", _zeros), ("NaN in one row", _tainted)):
        if change is _tainted and product and len(rows) == 1 and inputs[next(iter(rows))].element_size() == 2:
            continue
        values = {name: change(inputs[name], row_axis) for name, row_axis in rows.items()}
        new_inputs = {**inputs, **values}
        try:
            dims = contract.check(new_inputs, any_dtype=True)
            for rule in (contract.bounds, contract.values):
                if rule is not None:
                    rule(new_inputs, dims)
        except ValueError:
            continue
        if values:
            yield f"values: {label}", new_inputs


def rows_of(contract: Contract, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Returns, for each argument with rows, the index of the row dimension in its shape. This is the first dimension of
    the first float tensor that is longer than 1 and that the results, if any, have too."""
    floats = {
        name: argument
        for name, argument in contract.arguments.items()
        if isinstance(tensor := inputs.get(name), torch.Tensor) and tensor.ndim > 1 and tensor.is_floating_point()
    }
    if not floats:
        return {}
    first = next(iter(floats))
    results = {dim.name for result in contract.results.values() for dim in result.dims}
    shared_dims = [
        dim.text
        for dim, size in zip(floats[first].dims, inputs[first].shape, strict=False)
        if size > 1 and (dim.name in results or not contract.results)
    ]
    dim_names = {name: [dim.text for dim in argument.dims] for name, argument in floats.items()}
    return {
        name: texts.index(shared_dims[0])
        for name, texts in dim_names.items()
        if shared_dims and shared_dims[0] in texts[:-1] and inputs[name].dtype == inputs[first].dtype
    }


def _zeros(x: torch.Tensor, place: int) -> torch.Tensor:
    signs = torch.where(torch.arange(x.shape[-1], device=x.device) % 2 == 0, -0.0, 0.0)
    even_rows = torch.arange(x.shape[place], device=x.device) % 2 == 0
    even_rows = even_rows.view(-1, *[1] * (x.ndim - place - 1))
    return torch.where(even_rows, signs, x.float()).to(x.dtype)


def _tainted(x: torch.Tensor, place: int) -> torch.Tensor:
    tainted = torch.arange(x.shape[place], device=x.device) == x.shape[place] // 2
    return torch.where(tainted.view(-1, *[1] * (x.ndim - place - 1)), math.nan, x.float()).to(x.dtype)

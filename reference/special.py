"""Makes adversarial inputs for any op, from its contract: rows that mix 0.0 and -0.0, and a row of NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rooflab.reference.contract import Contract


def common_sets(contract: Contract, inputs: Mapping[str, Any], product: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields inputs with rows of 0.0 and -0.0, and inputs with one row of NaN, if the op's contract allows them.

    `product` says that the op is a matrix product. Its 16-bit inputs get no NaN, because oneDNN's product spreads a NaN
    to the previous row."""
    rows = rows_of(contract, inputs)
    for change_label, row_change in (("every second row zeros", _zeros), ("NaN in one row", _tainted)):
        if row_change is _tainted and product and len(rows) == 1 and inputs[next(iter(rows))].element_size() == 2:
            continue
        new_values = {input_name: row_change(inputs[input_name], row_axis) for input_name, row_axis in rows.items()}
        new_inputs = {**inputs, **new_values}
        try:
            dim_sizes = contract.check(new_inputs, any_dtype=True)
            for contract_rule in (contract.bounds, contract.values):
                if contract_rule is not None:
                    contract_rule(new_inputs, dim_sizes)
        except ValueError:
            continue
        if new_values:
            yield f"values: {change_label}", new_inputs


def rows_of(contract: Contract, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Finds the row dimension of an op's float inputs. Returns its index in each tensor that has it.

    The first float tensor with two or more dimensions decides. Its row dimension is the first of its dimensions whose
    name a result of the op has too. Dimensions of size 1 are skipped."""
    float_arguments = {
        arg_name: argument
        for arg_name, argument in contract.arguments.items()
        if isinstance(tensor := inputs.get(arg_name), torch.Tensor) and tensor.ndim > 1 and tensor.is_floating_point()
    }
    if not float_arguments:
        return {}
    first_arg_name = next(iter(float_arguments))
    result_dims = {dim.name for result in contract.results.values() for dim in result.dims}
    shared_dims = [
        dim.text
        for dim, dim_size in zip(float_arguments[first_arg_name].dims, inputs[first_arg_name].shape, strict=False)
        if dim_size > 1 and (dim.name in result_dims or not contract.results)
    ]
    dim_names = {arg_name: [dim.text for dim in argument.dims] for arg_name, argument in float_arguments.items()}
    return {
        arg_name: dim_texts.index(shared_dims[0])
        for arg_name, dim_texts in dim_names.items()
        if shared_dims and shared_dims[0] in dim_texts[:-1] and inputs[arg_name].dtype == inputs[first_arg_name].dtype
    }


def _zeros(x: torch.Tensor, place: int) -> torch.Tensor:
    signed_zeros = torch.where(torch.arange(x.shape[-1], device=x.device) % 2 == 0, -0.0, 0.0)
    even_row_mask = torch.arange(x.shape[place], device=x.device) % 2 == 0
    even_row_mask = even_row_mask.view(-1, *[1] * (x.ndim - place - 1))
    return torch.where(even_row_mask, signed_zeros, x.float()).to(x.dtype)


def _tainted(x: torch.Tensor, place: int) -> torch.Tensor:
    nan_row_mask = torch.arange(x.shape[place], device=x.device) == x.shape[place] // 2
    return torch.where(nan_row_mask.view(-1, *[1] * (x.ndim - place - 1)), math.nan, x.float()).to(x.dtype)

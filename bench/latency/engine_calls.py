"""Describes the engine's calls of its ops: the arguments by name, the shape, and the call's position in the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from rooflab.engine.choose.model_shapes import FUSED_OP, gated
from rooflab.kernels.registry import get_op
from rooflab.roofline.architecture import Architecture


def inputs_of(op: str, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """Returns a call's arguments by name.  A meta tensor of the unpacked shape replaces a packed weight."""
    signature = inspect.Signature(get_op(op).parameters)
    if "b" in signature.parameters:
        a, layouts, *other_args = arguments
        weight_columns = result.shape[-1] * (2 if op == FUSED_OP else 1)
        if op == "gemm_gguf":
            b, scale, minimum = next(layout for layout in layouts if layout is not None)
            weight = torch.empty(b.shape, dtype=b.dtype, device="meta")
            arguments = a, weight, scale, minimum, *other_args
        else:
            weight = torch.empty((weight_columns, a.shape[-1]), dtype=a.dtype, device="meta").mT
            arguments = a, weight, *other_args
    bound_inputs = signature.bind(*arguments, **options)
    bound_inputs.apply_defaults()
    return dict(bound_inputs.arguments)


def weight_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Returns N and K of the weight `b`, for `a` of shape `[M, K]`.  `b` is `[K, N]`, or codes with N rows."""
    b, K = inputs["b"], inputs["a"].shape[-1]
    return b.shape[1] if b.dtype.is_floating_point else b.shape[0], K


def shape_of(inputs: Mapping[str, Any]) -> str:
    """Returns a text with the sizes that distinguish a call from other calls of the same op."""
    if "b" in inputs:
        return "M={},N={},K={}".format(len(inputs["a"]), *weight_shape(inputs))
    input_tensors = [input_value for input_value in inputs.values() if isinstance(input_value, torch.Tensor)]
    return "x".join(map(str, input_tensors[0].shape)) if input_tensors else ""


def site_of(arch: Architecture, inputs: Mapping[str, Any]) -> str:
    """Returns the name of the weight in a matrix product, such as `qkv_proj`.  The weight's shape identifies it."""
    q, kv_columns = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    weight_by_shape = {
        (q + 2 * kv_columns, arch.hidden_size): "qkv_proj",
        (arch.hidden_size, q): "o_proj",
        (2 * arch.intermediate_size, arch.hidden_size): "gate_up_proj",
        (arch.hidden_size, arch.intermediate_size): "down_proj",
        (arch.vocab_size, arch.hidden_size): "lm_head",
    }
    return weight_by_shape.get(weight_shape(inputs), gated(arch))

"""The engine's calls of its ops: their arguments by name, and the case that each is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from rooflab.engine.choose.model_shapes import FUSED, PRODUCTS, gated
from rooflab.engine.choose.op_times import wrapped_ops
from rooflab.engine.model_runner import ModelRunner
from rooflab.kernels.registry import get_op
from rooflab.reference.spec import DTYPE_NAMES, Case
from rooflab.roofline.architecture import Architecture


def watched_ops(
    runner: ModelRunner, note: Callable[[str, tuple[Any, ...], Mapping[str, Any], Any], None]
) -> AbstractContextManager[None]:
    """A context that tells `note` the op, the arguments, the options and the result of each of the engine's calls."""

    def noted(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            note(op, arguments, options, result)
            return result

        return call

    return wrapped_ops(runner, noted)


def inputs_of(op: str, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """The arguments of one of the engine's calls by name; a packed weight is a tensor of its shape without data."""
    bound_to = inspect.Signature(get_op(op).parameters)
    if "b" in bound_to.parameters:
        a, _, *rest = arguments
        columns = result.shape[-1] * (2 if op == FUSED else 1)
        weight = torch.empty((columns, a.shape[-1]), dtype=a.dtype, device="meta").mT
        if op == "gemm_w8a16":
            scale = torch.empty(columns, dtype=torch.float32, device="meta")
            arguments = a, weight.to(torch.int8), scale, *rest
        else:
            arguments = a, weight, *rest
    given = bound_to.bind(*arguments, **options)
    given.apply_defaults()
    return dict(given.arguments)


def case_of(op: str, inputs: Mapping[str, Any]) -> tuple[Case, str] | None:
    """The case and the scheme of such a call; None for an op whose calls are not kept as cases.

    Sequences of several lengths become as many of their mean length, in decoding rounded up to whole pages: the bytes
    and products are those of the call, and steps that differ by a token are one case.
    """
    x = next(value for value in inputs.values() if isinstance(value, torch.Tensor) and value.is_floating_point())
    scheme, sizes = DTYPE_NAMES.get(x.dtype), dict[str, Any]()
    if op in PRODUCTS:
        K, N = inputs["b"].shape
        sizes = {"M": len(x), "N": N, "K": K} | ({"layout": "NT"} if op == "gemm" else {})
        sizes["bias"] = inputs.get("bias") is not None
    elif op in ("rmsnorm", "fused_add_rmsnorm"):
        sizes = {"T": len(x), "H": x.shape[1], "eps": inputs["eps"]}
    elif op in ("silu_and_mul", "gelu_and_mul"):
        sizes = {"T": len(x), "I": x.shape[1] // 2}
    elif op == "embedding":
        sizes = {"T": len(inputs["token_ids"]), "V": x.shape[0], "H": x.shape[1]}
    elif op == "paged_attention" and inputs.get("cu_seqlens_q") is None:
        (B, H, D), (_, page, H_kv, _) = x.shape, inputs["k_cache"].shape
        pages = math.ceil(int(inputs["seq_lens"].sum()) / (B * page))
        sizes = {"B": B, "context": pages * page, "H": H, "H_kv": H_kv, "D": D, "block_size": page, "ragged": False}
        sizes |= _attention_options(inputs)
    elif op == "flash_attention_varlen":
        B, k = len(inputs["cu_seqlens_q"]) - 1, inputs["k"]
        sizes = {"B": B, "T": math.ceil(len(x) / B), "S": math.ceil(len(k) / B), "H": x.shape[1], "H_kv": k.shape[1]}
        sizes |= {"D": x.shape[2], "causal": bool(inputs["causal"]), **_attention_options(inputs)}
        sizes |= {} if B == 1 else {"ragged": False}
    elif op == "sample":
        greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        sizes = {"B": len(x), "V": x.shape[1], **greedy}
    elif op == "rope_and_cache":
        pages = inputs["k_cache"].shape
        sizes = {"T": len(x), "H": x.shape[1], "H_kv": inputs["k"].shape[1], "D": x.shape[2]}
        sizes |= {"rotary": 2 * inputs["cos"].shape[1], "max_position": len(inputs["cos"]), "num_blocks": pages[0]}
        sizes |= {"block_size": pages[1], "skipped": 0, "interleaved": False}
    return (Case(**sizes), scheme) if sizes and scheme else None


def _attention_options(inputs: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: inputs.get(name) for name in ("window", "softcap", "sinks")}
    return {name: True if name == "sinks" else value for name, value in given.items() if value is not None}


def shape_of(inputs: Mapping[str, Any]) -> str:
    """The sizes that tell a call from others of its op."""
    if "b" in inputs:
        return f"M={len(inputs['a'])},N={inputs['b'].shape[1]},K={inputs['b'].shape[0]}"
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    return "x".join(map(str, tensors[0].shape)) if tensors else ""


def site_of(arch: Architecture, inputs: Mapping[str, Any]) -> str:
    """Where in the model a product is."""
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    sites = {
        (q + 2 * kv, arch.hidden_size): "qkv_proj",
        (arch.hidden_size, q): "o_proj",
        (2 * arch.intermediate_size, arch.hidden_size): "gate_up_proj",
        (arch.hidden_size, arch.intermediate_size): "down_proj",
        (arch.vocab_size, arch.hidden_size): "lm_head",
    }
    return sites.get(tuple(inputs["b"].shape[::-1]), gated(arch))

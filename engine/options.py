"""Checks the options of an engine before any file is read."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INT8 = "int8"
"""A dtype for CPUs: the weights of products are int8 codes with a scale per output, and the rest is bfloat16."""


def check_sizes(**sizes: int | None) -> None:
    """Raises `ValueError` if a size is not an integer, is too small, or conflicts with another size."""
    for name, value in sizes.items():
        minimum = 2 if name == "max_model_len" else 1  # a token of the prompt, and one after it
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
            raise ValueError(f"{name}: expected an integer of at least {minimum}, got {value!r}")
    tokens, seqs = sizes["max_num_batched_tokens"], sizes["max_num_seqs"]
    if tokens is not None and seqs is not None and tokens < seqs:
        raise ValueError(
            f"max_num_batched_tokens: expected at least max_num_seqs, which is {seqs}, for a step has a token of each "
            f"sequence; got {tokens}"
        )


def device_of(name: str | None) -> torch.device:
    """Returns the device `name`; None means a GPU if there is one.  Raises `ValueError` if the device is missing."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, and torch finds no CUDA device")
    return torch.device(name)


def check_pdl(device: torch.device, enforce_eager: bool) -> None:
    """Raises `ValueError` if kernels cannot start early: without CUDA graphs, or on a GPU below capability 9.0."""
    actual_value = "enforce_eager" if enforce_eager else device.type
    if device.type == "cuda" and not enforce_eager:
        capability = torch.cuda.get_device_capability(device)
        if capability >= (9, 0):
            return
        actual_value = "compute capability {}.{}".format(*capability)
    raise ValueError(f"pdl: expected CUDA graphs on a GPU of compute capability 9.0 or later, got {actual_value}")


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """Returns the dtype `name`; None means float32 on a CPU, bfloat16 on CUDA.  Raises `ValueError` if unsupported."""
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == INT8:
        if device.type != "cpu":
            raise ValueError("dtype: expected float32, bfloat16 or float16 on CUDA, got 'int8'; int8 runs on a CPU")
        return torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype: expected {', '.join((*DTYPES, INT8))}, got {name!r}")
    return DTYPES[name]

"""Checks the options of an engine before any file is read."""

from __future__ import annotations

import torch

from rooflab.engine.load.coded import CODE_DTYPES, GROUP
from rooflab.roofline.architecture import Architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODES = (*CODE_DTYPES, "keep")
"""Dtypes for CPUs: the weights of products are codes with scales (`LargestSizes.codes`), and the rest is bfloat16."""


def check_sizes(**sizes: int | None) -> None:
    """Raises `ValueError` if a size is not an integer, is too small, or conflicts with another size."""
    for name, value in sizes.items():
        least_value = 2 if name == "max_model_len" else 1  # a token of the prompt, and one after it
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least_value):
            raise ValueError(f"{name}: expected an integer of at least {least_value}, got {value!r}")
    max_tokens, seqs = sizes["max_num_batched_tokens"], sizes["max_num_seqs"]
    if max_tokens is not None and seqs is not None and max_tokens < seqs:
        raise ValueError(
            f"max_num_batched_tokens: expected at least max_num_seqs, which is {seqs}, for a step has a token of each "
            f"sequence; got {max_tokens}"
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
    """Raises `ValueError` if kernels cannot start early (PDL), which needs CUDA graphs and compute capability 9.0."""
    actual_value = "enforce_eager" if enforce_eager else device.type
    if device.type == "cuda" and not enforce_eager:
        capability = torch.cuda.get_device_capability(device)
        if capability >= (9, 0):
            return
        actual_value = "compute capability {}.{}".format(*capability)
    raise ValueError(f"pdl: expected CUDA graphs on a GPU of compute capability 9.0 or later, got {actual_value}")


def dtype_of(name: str | None, device: torch.device) -> tuple[torch.dtype, str]:
    """Returns the dtype for `name`, and the format of linear layers' weights: one of `CODES`, or an empty text.

    None means float32 on a CPU and bfloat16 on CUDA.  Raises `ValueError` if the dtype is not supported."""
    if name is None:
        return (torch.float32 if device.type == "cpu" else torch.bfloat16), ""
    if name in CODES:
        if device.type != "cpu":
            raise ValueError(f"dtype: expected {', '.join(DTYPES)} on CUDA, got {name!r}, which runs on a CPU")
        return torch.bfloat16, name
    if name not in DTYPES:
        raise ValueError(f"dtype: expected {', '.join((*DTYPES, *CODES))}, got {name!r}")
    return DTYPES[name], ""


def check_groups(arch: Architecture, dtype: str) -> None:
    """Raises `ValueError` if `dtype` quantises weights (int8, int4) and a row is not a multiple of a group."""
    row_widths = {
        "hidden_size": arch.hidden_size,
        "num_heads * head_dim": arch.num_heads * arch.head_dim,
        "intermediate_size": arch.intermediate_size,
    }
    for name, row_width in row_widths.items():
        if dtype in CODE_DTYPES and row_width % GROUP:
            raise ValueError(f"dtype: {dtype} needs {name} in multiples of {GROUP}, and {arch.name} has {row_width}")

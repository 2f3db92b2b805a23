"""How a weight is packed: a kernel's `prepare` is given the weight, and by name what lies beside it in a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def packed(prepare: Callable[..., Any], weight: str, inputs: Mapping[str, Any]) -> Any:
    """The argument `weight` of `inputs` as `prepare` packs it, with the others that it names."""
    beside = list(inspect.signature(prepare).parameters)[1:]
    return prepare(inputs[weight], **{name: inputs[name] for name in beside})

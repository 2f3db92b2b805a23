"""Drafts by Medusa's heads, each of which guesses one of the next tokens (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import silu

from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.draft_model import by_sequence
from rooflab.engine.speculate.heads import HiddenDrafter, Shapes
from rooflab.engine.speculate.runner import SpeculativeRunner
from rooflab.roofline.architecture import Architecture


def medusa_shapes(found: Shapes, arch: Architecture, count: int) -> Shapes:
    """What `count` Medusa heads have for a model of `arch`: some layers x + silu(W x + b), and a head.

    Raises `ValueError` if there are fewer heads.
    """
    heads = len({name.split(".")[0] for name in found if name.split(".")[0].isdigit()})
    if heads < count:
        raise ValueError(f"num_speculative_tokens: expected at most the number of heads, which is {heads}, got {count}")
    layers = sum(name.startswith("0.") and name.endswith(".linear.weight") for name in found)
    H = arch.hidden_size
    wanted: Shapes = {}
    for head in range(count):
        for layer in range(layers):
            wanted |= {f"{head}.{layer}.linear.weight": (H, H), f"{head}.{layer}.linear.bias": (H,)}
        wanted[f"{head}.{layers}.weight"] = (arch.vocab_size, H)
    return wanted


class MedusaDrafter(HiddenDrafter):
    """Head i drafts the token i + 2 places behind the hidden state, each without regard to the others' tokens."""

    def __init__(self, runner: SpeculativeRunner, tensors: dict[str, torch.Tensor]):
        super().__init__(runner)
        self._heads: list[tuple[list[tuple[Any, torch.Tensor]], Any]] = []
        for head in range(len({name.split(".")[0] for name in tensors})):
            names = sorted(name for name in tensors if name.startswith(f"{head}.") and name.endswith(".linear.weight"))
            layers = [(runner.ops.prepare(tensors[name]), tensors[name.replace("weight", "bias")]) for name in names]
            self._heads.append((layers, runner.ops.prepare(tensors[f"{head}.{len(names)}.weight"])))

    def draft(self, drafting: Sequence[tuple[EngineSequence, int]]) -> dict[EngineSequence, list[int]]:
        """The likeliest token of each head."""
        drafting = sorted(drafting, key=lambda pair: -pair[1])
        sequences, counts = [one for one, _ in drafting], np.array([most for _, most in drafting])
        states, drawn = self.states(sequences, [len(one.token_ids) - 1 for one in sequences]), []
        for place, (layers, head) in enumerate(self._heads[: int(counts[0])]):
            n = int((counts > place).sum())
            ops, x = self.runner.ops.step(n), states[:n]
            for weight, bias in layers:
                x = x + silu(ops.gemm(x, weight, bias))
            drawn.append(ops.gemm(x, head).argmax(-1))
        return by_sequence(sequences, drawn)

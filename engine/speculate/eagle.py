"""Drafts by EAGLE: one decoder layer predicts the next hidden state (Li et al., arXiv 2401.15077).

The draft is a chain of tokens, not a tree.  The layer reads the model's hidden state before the newest token, which the
previous step computed.  After a prefix that was found in the KV cache this state is not known.  Then the state is 0,
which lowers the acceptance of the first drafts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rooflab.engine.load.checkpoints import read_safetensors
from rooflab.engine.load.weights import Weights, packed_layer, parameter_shapes
from rooflab.engine.model import Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.sampling import on_device
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.draft_model import Chain
from rooflab.engine.speculate.runner import SpeculativeRunner
from rooflab.roofline.architecture import Architecture

_LAYER = "layers.0."


def read_head(
    files: Sequence[Path], arch: Architecture, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Reads the tensors of an EAGLE head: the product of an embedding and a hidden state, and a decoder layer without a
    norm before its attention.  Raises `ValueError` if a tensor is missing or has another shape."""
    stored = {name: tensor for file in files for name, tensor in read_safetensors(file, option="draft")}
    layer = {name.removeprefix("model."): shape for name, shape in parameter_shapes(arch).items()}
    shapes = {name: shape for name, shape in layer.items() if _LAYER in name and "input_layernorm" not in name}
    H = arch.hidden_size
    shapes |= {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if "fc.bias" in stored else {})
    for name, shape in shapes.items():
        if name not in stored or tuple(stored[name].shape) != shape:
            got = tuple(stored[name].shape) if name in stored else "none"
            raise ValueError(f"draft: expected {name} of shape {shape}, got {got}")
    return {name: stored[name].to(device, dtype) for name in shapes}  # others, as the embedding, are the model's own


class EagleDrafter(Chain):
    """A layer that takes a token's embedding and the hidden state before the token.  It returns the token's hidden
    state.

    The pages have the same numbers as the model's pages.  A draft writes a token's entry from a predicted hidden state.
    The step that computes the token writes the entry again, from the model's own hidden state."""

    reads_hidden = True

    def __init__(self, runner: SpeculativeRunner, arch: Architecture, head: dict[str, torch.Tensor], ops: OpSet):
        embedding = runner.model.embedding
        ones = torch.ones(arch.hidden_size, dtype=embedding.dtype, device=runner.device)
        layer = packed_layer(arch, head | {f"{_LAYER}input_layernorm.weight": ones}, _LAYER)
        # The output head is the model's, and is not packed again.
        weights = Weights(embedding, [layer], ones, ones[None, :])
        super().__init__(runner, Model(arch, weights, ops, runner.max_model_len), ops)
        self.fc, self.fc_bias = ops.prepare(head["fc.weight"]), head.get("fc.bias")
        self._hidden: WeakKeyDictionary[EngineSequence, tuple[int, torch.Tensor]] = WeakKeyDictionary()
        """For each sequence, a position and the model's hidden state (H,) before the token at that position."""

    def begin(self, sequences: Sequence[EngineSequence]) -> torch.Tensor:
        """Returns the model's hidden states before the newest tokens."""
        return self._states(sequences, [len(sequence.token_ids) - 1 for sequence in sequences])

    def forward(self, inputs: StepInput, ops: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits from the model's output head, and the next hidden states, as `Chain.forward` does."""
        hidden = self._next_states(inputs, ops, state)
        logits: torch.Tensor = self.runner.ops.step(len(hidden)).gemm(hidden, self.runner.model.lm_head)
        return logits, hidden

    def accepted(self, sequences: Sequence[EngineSequence], counts: Sequence[int], states: torch.Tensor) -> None:
        """Keeps the hidden states for the next drafts."""
        for sequence, count, state in zip(sequences, counts, states, strict=True):
            self._hidden[sequence] = (len(sequence.token_ids) - 1 + count, state)

    def follow(
        self, step: Step, inputs: StepInput, decoding: Sequence[EngineSequence], hidden: torch.Tensor | None
    ) -> None:
        """Writes the keys and values of all tokens of the step, each from the hidden state before the token."""
        assert hidden is not None, "the runner gives what the drafter reads"
        n = len(inputs.seq_lens)
        sequences = [*decoding, *(chunk.sequence for chunk in step.chunks)]
        firsts, ends = np.arange(n), np.empty(0, np.int64)
        if inputs.chunks is not None:
            bounds = inputs.chunks.cu_seqlens.cpu().numpy().astype(np.int64) + n
            firsts, ends = np.concatenate([firsts, bounds[:-1]]), bounds[len(bounds) - len(step.chunks) :]
        positions = inputs.positions.cpu().numpy()[firsts].tolist()
        before = torch.cat([hidden[:1], hidden[:-1]])
        before[on_device(firsts, self.runner.device)] = self._states(sequences, positions)
        self._next_states(replace(inputs, drawn=None), self.ops_of(inputs), before)
        for chunk, end in zip(step.chunks, ends, strict=True):
            self._hidden[chunk.sequence] = (chunk.end, hidden[end - 1])

    def _states(self, sequences: Sequence[EngineSequence], positions: Sequence[int]) -> torch.Tensor:
        """Returns the model's hidden states (rows, H) before the tokens at `positions`.  Unknown states are 0."""
        embedding = self.runner.model.embedding
        zeros = embedding.new_zeros(embedding.shape[1])
        pairs = (self._hidden.get(sequence, (0, zeros)) for sequence in sequences)
        states = [state if at == place else zeros for (at, state), place in zip(pairs, positions, strict=True)]
        return torch.stack(states) if states else zeros[None, :][:0]

    def _next_states(self, inputs: StepInput, ops: Any, before: torch.Tensor) -> torch.Tensor:
        model, layer = self.model, self.model.layers[0]
        x = ops.embedding(inputs.token_ids, model.embedding) * self.runner.model.embedding_scale
        residual = x = ops.gemm(torch.cat([x, before], 1), self.fc, self.fc_bias)
        x = ops.gemm(model.attention(x, layer, inputs, self.cache.keys[0], self.cache.values[0], ops), layer.o)
        x, residual = ops.fused_add_rmsnorm(x, residual, layer.post_norm, model.arch.rms_norm_eps)
        hidden: torch.Tensor = ops.gemm(model.gated(x, layer.gate_up, ops), layer.down) + residual
        return hidden

"""Drafts tokens with EAGLE: one decoder layer predicts the next hidden state (Li et al., arXiv 2401.15077).

A draft is a chain of tokens, not a tree.  The layer reads the model's hidden state before the newest token.  After a
hit in the prefix cache this state is unknown, so the layer reads zeros.  Then the first drafts are accepted less often.
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
from rooflab.engine.load.coded import Weight
from rooflab.engine.load.weights import Weights, packed_layer, parameter_shapes
from rooflab.engine.model import Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.sampling import on_device
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.draft_model import ModelDrafter
from rooflab.engine.speculate.runner import SpeculativeRunner
from rooflab.roofline.architecture import Architecture

_LAYER_PREFIX = "layers.0."


def read_head(
    files: Sequence[Path], arch: Architecture, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Reads an EAGLE head: a linear layer on an embedding and a hidden state, and a decoder layer without a norm before
    its attention.  Raises `ValueError` if a tensor is missing or has another shape."""
    tensor_of = {name: tensor for file in files for name, tensor in read_safetensors(file, option="draft")}
    layer = {name.removeprefix("model."): shape for name, shape in parameter_shapes(arch).items()}
    shapes = {name: shape for name, shape in layer.items() if _LAYER_PREFIX in name and "input_layernorm" not in name}
    H = arch.hidden_size
    shapes |= {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if "fc.bias" in tensor_of else {})
    for name, shape in shapes.items():
        if name not in tensor_of or tuple(tensor_of[name].shape) != shape:
            actual_shape = tuple(tensor_of[name].shape) if name in tensor_of else "none"
            raise ValueError(f"draft: expected {name} of shape {shape}, got {actual_shape}")
    return {name: tensor_of[name].to(device, dtype) for name in shapes}  # others, as the embedding, are the model's own


class EagleDrafter(ModelDrafter):
    """Drafts with one decoder layer, which predicts a token's hidden state from its embedding and the previous state.

    The layer's KV cache uses the page numbers of the model's KV cache.  A draft writes keys and values from predicted
    hidden states.  The step that verifies the draft overwrites them."""

    reads_hidden = True

    def __init__(self, runner: SpeculativeRunner, arch: Architecture, head: dict[str, Weight], ops: OpSet):
        embedding = runner.model.embedding
        ones = torch.ones(arch.hidden_size, dtype=embedding.dtype, device=runner.device)
        layer = packed_layer(arch, head | {f"{_LAYER_PREFIX}input_layernorm.weight": ones}, _LAYER_PREFIX)
        # The output head is the model's, and is not packed again.
        weights = Weights(embedding, [layer], ones, ones[None, :])
        super().__init__(runner, Model(arch, weights, ops, runner.max_model_len), ops)
        self.fc, self.fc_bias = ops.prepare(head["fc.weight"]), head.get("fc.bias")
        self._hidden: WeakKeyDictionary[EngineSequence, tuple[int, torch.Tensor]] = WeakKeyDictionary()
        """For each sequence, a position and the model's hidden state (H,) before the token at that position."""

    def begin(self, sequences: Sequence[EngineSequence]) -> torch.Tensor:
        """Returns for each sequence the hidden state from which the model drew the newest token."""
        return self._states(sequences, [len(sequence.token_ids) - 1 for sequence in sequences])

    def forward(self, inputs: StepInput, ops: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits of the model's output head, and the predicted hidden states as the next `state`."""
        hidden_states = self._next_states(inputs, ops, state)
        logits: torch.Tensor = self.runner.ops.step(len(hidden_states)).gemm(hidden_states, self.runner.model.lm_head)
        return logits, hidden_states

    def accepted(self, sequences: Sequence[EngineSequence], counts: Sequence[int], states: torch.Tensor) -> None:
        """Keeps `states`, the hidden states from which the next drafts start."""
        for sequence, num_new_tokens, state in zip(sequences, counts, states, strict=True):
            self._hidden[sequence] = (len(sequence.token_ids) - 1 + num_new_tokens, state)

    def follow(
        self, step: Step, inputs: StepInput, decoding: Sequence[EngineSequence], hidden: torch.Tensor | None
    ) -> None:
        """Writes the keys and values of all tokens of the step, each from the hidden state of the previous token."""
        assert hidden is not None, "the runner gives what the drafter reads"
        n = len(inputs.seq_lens)
        sequences = [*decoding, *(chunk.sequence for chunk in step.chunks)]
        first_rows, chunk_ends = np.arange(n), np.empty(0, np.int64)
        if inputs.chunks is not None:
            bounds = inputs.chunks.cu_seqlens.cpu().numpy().astype(np.int64) + n
            first_rows, chunk_ends = np.concatenate([first_rows, bounds[:-1]]), bounds[len(bounds) - len(step.chunks) :]
        positions = inputs.positions.cpu().numpy()[first_rows].tolist()
        previous_states = torch.cat([hidden[:1], hidden[:-1]])
        previous_states[on_device(first_rows, self.runner.device)] = self._states(sequences, positions)
        self._next_states(replace(inputs, drawn=None), self.ops_of(inputs), previous_states)
        for chunk, chunk_end in zip(step.chunks, chunk_ends, strict=True):
            self._hidden[chunk.sequence] = (chunk.end, hidden[chunk_end - 1])

    def _states(self, sequences: Sequence[EngineSequence], positions: Sequence[int]) -> torch.Tensor:
        """Returns the model's hidden states `[rows, H]` of the tokens before `positions`.  An unknown state is 0."""
        embedding = self.runner.model.embedding
        zeros = embedding.new_zeros(embedding.shape[1])
        entries = (self._hidden.get(sequence, (0, zeros)) for sequence in sequences)
        states = [state if at == position else zeros for (at, state), position in zip(entries, positions, strict=True)]
        return torch.stack(states) if states else zeros[None, :][:0]

    def _next_states(self, inputs: StepInput, ops: Any, before: torch.Tensor) -> torch.Tensor:
        model, layer = self.model, self.model.layers[0]
        x = ops.embedding(inputs.token_ids, model.embedding) * self.runner.model.embedding_scale
        residual = x = ops.gemm(torch.cat([x, before], 1), self.fc, self.fc_bias)
        x = ops.gemm(model.attention(x, layer, inputs, self.cache.keys[0], self.cache.values[0], ops), layer.o)
        x, residual = ops.fused_add_rmsnorm(x, residual, layer.post_norm, model.arch.rms_norm_eps)
        hidden_states: torch.Tensor = ops.gemm(model.gated(x, layer.gate_up, ops), layer.down) + residual
        return hidden_states

"""Drafts by EAGLE: one decoder layer guesses the next hidden state (Li et al., arXiv 2401.15077)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rooflab.engine.load.weights import LayerWeights, Weights, parameter_shapes
from rooflab.engine.model import KVCache, Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.draft_model import Chain
from rooflab.engine.speculate.drafter import Reads
from rooflab.engine.speculate.heads import HiddenDrafter, Shapes
from rooflab.engine.speculate.runner import SpeculativeRunner
from rooflab.roofline.architecture import Architecture


def eagle_shapes(found: Shapes, arch: Architecture) -> Shapes:
    """What an EAGLE layer of `arch` has: the product of an embedding and a hidden state, and a decoder layer without a
    norm before its attention."""
    H = arch.hidden_size
    layer = {name: shape for name, shape in parameter_shapes(arch).items() if name.startswith("model.layers.")}
    wanted: Shapes = {
        name.removeprefix("model."): shape for name, shape in layer.items() if "input_layernorm" not in name
    }
    wanted["fc.weight"] = (H, 2 * H)
    return wanted | ({"fc.bias": (H,)} if "fc.bias" in found else {})


class EagleDrafter(HiddenDrafter, Chain):
    """A layer that takes a token's embedding and the hidden state before it, and gives the hidden state at the token.

    Its pages have the model's numbers; the entry of a token is written anew by each step that computes the token, from
    the model's own hidden state, where the draft had a guess.
    """

    reads: Reads = "all hidden states"

    def __init__(self, runner: SpeculativeRunner, arch: Architecture, tensors: dict[str, torch.Tensor], ops: OpSet):
        Chain.__init__(self, runner, ops)
        HiddenDrafter.__init__(self, runner)
        model, layer = runner.model, "layers.0."
        parts = {name.removeprefix(layer): tensor for name, tensor in tensors.items() if name.startswith(layer)}
        join = [parts[f"self_attn.{part}_proj.weight"] for part in "qkv"]
        biases = [parts[f"self_attn.{part}_proj.bias"] for part in "qkv"] if arch.attention_bias else None
        norms = [parts.get(f"self_attn.{part}_norm.weight") for part in "qk"]
        one = torch.ones(arch.hidden_size, dtype=model.embedding.dtype, device=runner.device)
        weights = LayerWeights(
            one,
            torch.cat(join),
            None if biases is None else torch.cat(biases),
            norms[0],
            norms[1],
            parts["self_attn.o_proj.weight"],
            parts["post_attention_layernorm.weight"],
            torch.cat([parts["mlp.gate_proj.weight"], parts["mlp.up_proj.weight"]]),
            parts["mlp.down_proj.weight"],
        )
        # The head, which is the model's, is not packed again.
        self.model = Model(arch, Weights(model.embedding, [weights], one, one[None, :]), ops, runner.max_model_len)
        self.fc, self.fc_bias = ops.prepare(tensors["fc.weight"]), tensors.get("fc.bias")
        self.cache = KVCache([], [])

    def allocate(self, num_blocks: int) -> None:
        """Makes the layer's pages."""
        self.cache = self.runner.new_cache(self.model.arch, num_blocks)

    def begin(self, sequences: Sequence[EngineSequence]) -> torch.Tensor:
        """The hidden states before the newest tokens."""
        return self.states(sequences, [len(one.token_ids) - 1 for one in sequences])

    def forward(self, inputs: StepInput, ops: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Chain`: the model's head on the next hidden states, and these."""
        hidden = self._states_at(inputs, ops, state)
        logits: torch.Tensor = self.runner.ops.step(len(hidden)).gemm(hidden, self.runner.model.lm_head)
        return logits, hidden

    def _states_at(self, inputs: StepInput, ops: Any, before: torch.Tensor) -> torch.Tensor:
        model, layer = self.model, self.model.layers[0]
        x = ops.embedding(inputs.token_ids, model.embedding) * self.runner.model.embedding_scale
        residual = x = ops.gemm(torch.cat([x, before], 1), self.fc, self.fc_bias)
        x = ops.gemm(model.attention(x, layer, inputs, self.cache.keys[0], self.cache.values[0], ops), layer.o)
        x, residual = ops.fused_add_rmsnorm(x, residual, layer.post_norm, model.arch.rms_norm_eps)
        hidden: torch.Tensor = ops.gemm(model.gated(x, layer.gate_up, ops), layer.down) + residual
        return hidden

    def follow(
        self, step: Step, inputs: StepInput, decoding: Sequence[EngineSequence], hidden: torch.Tensor | None
    ) -> None:
        """Writes the entries of all tokens of the step, from the hidden state before each."""
        assert hidden is not None, "the runner gives what the drafter reads"
        n = len(inputs.seq_lens)
        sequences = [*decoding, *(chunk.sequence for chunk in step.chunks)]
        firsts, ends = np.arange(n), np.empty(0, np.int64)
        if inputs.chunks is not None:
            bounds = inputs.chunks.cu_seqlens.cpu().numpy().astype(np.int64) + n
            firsts, ends = np.concatenate([firsts, bounds[:-1]]), bounds[len(bounds) - len(step.chunks) :]
        positions = inputs.positions.cpu().numpy()[firsts].tolist()
        before = torch.cat([hidden[:1], hidden[:-1]])
        before[self._to(firsts)] = self.states(sequences, positions)
        self._states_at(replace(inputs, drawn=None), self.ops_of(inputs), before)
        for chunk, end in zip(step.chunks, ends, strict=True):
            self._hidden[chunk.sequence] = (chunk.end, hidden[end - 1])

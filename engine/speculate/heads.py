"""Drafts by heads trained on the model's hidden states: Medusa (Cai et al., arXiv 2401.10774), whose heads each guess
one of the next tokens, and EAGLE (Li et al., arXiv 2401.15077), one decoder layer that guesses the next hidden state.

A chain of the likeliest tokens is drafted, not a tree.  A head's state is the model's hidden state at the token before
the newest, which the step before computed; where a prefix was found in the KV cache it is not known, and is 0, which
costs acceptance at the first drafts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import silu

from rooflab.engine.model import KVCache, Model, StepInput
from rooflab.engine.model_runner import ModelRunner
from rooflab.engine.ops import OpSet
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.draft_model import Chain
from rooflab.engine.speculate.drafter import Drafter, Reads
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.weights import LayerWeights, Weights, parameter_shapes
from rooflab.roofline.architecture import Architecture

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadFiles:
    """The tensors of a folder with *.safetensors."""

    folder: Path

    def shapes(self) -> Shapes:
        """Names and shapes, without the tensors.  Raises `ValueError` if there is no whole file."""
        return {name: tuple(handle.get_slice(name).get_shape()) for handle, name in self._each()}

    def tensors(self, wanted: Iterable[str], limits: Any) -> dict[str, torch.Tensor]:
        """Those of `wanted`, in the model's dtype and on its device."""
        names = set(wanted)
        found = {name: handle.get_tensor(name) for handle, name in self._each() if name in names}
        return {name: tensor.to(limits.device, limits.dtype) for name, tensor in found.items()}

    def _each(self) -> Iterator[tuple[Any, str]]:
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"draft: expected a folder with *.safetensors, got {str(self.folder)!r}")
        for file in files:
            try:
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118
                        yield handle, name
            except SafetensorError as error:
                raise ValueError(f"draft: {file.name} is not a whole safetensors file: {error}") from error


def check_shapes(found: Shapes, wanted: Shapes) -> None:
    """Raises `ValueError` unless every tensor that is wanted is there with its shape."""
    for name, shape in wanted.items():
        if name not in found:
            raise ValueError(f"draft: the heads lack the tensor {name!r}, of shape {shape}")
        if found[name] != shape:
            raise ValueError(f"draft: expected {name} of shape {shape}, got {found[name]}")


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


class HiddenDrafter(Drafter):
    """Keeps for each sequence the hidden state behind which its newest token was drawn, and that token's position."""

    reads: Reads = "hidden states"

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._drawn = torch.empty(0)

    def follow(self, step: Step, inputs: StepInput, hidden: torch.Tensor | None, sizes: tuple[int, int, int]) -> None:
        """Takes the hidden states of the rows that are drawn."""
        assert hidden is not None, "the runner gives what the drafter reads"
        self._drawn = hidden

    def noted(self, sequences: Sequence[EngineSequence], counts: Sequence[int]) -> None:
        """Keeps the state of the last row that counts."""
        row = 0
        for one, count in zip(sequences, counts, strict=True):
            one.hidden = (len(one.token_ids) - 1 + count, self._drawn[row + count - 1])
            row += len(one.draft) + 1

    def states(self, sequences: Sequence[EngineSequence], positions: Sequence[int]) -> torch.Tensor:
        """The hidden states (rows, H) before the tokens at `positions`; 0 where it is not known."""
        arch, like = self.runner.model.arch, self.runner.model.embedding
        none = torch.zeros(arch.hidden_size, dtype=like.dtype, device=like.device)
        known = (one.hidden or (0, none) for one in sequences)
        each = [state if at == place else none for (at, state), place in zip(known, positions, strict=True)]
        return torch.stack(each) if each else none[None, :][:0]


class MedusaDrafter(HiddenDrafter):
    """Head i drafts the token i + 2 places behind the hidden state, each without regard to the others' tokens."""

    def __init__(self, runner: ModelRunner, tensors: dict[str, torch.Tensor]):
        super().__init__(runner)
        self._heads: list[tuple[list[tuple[Any, torch.Tensor]], Any]] = []
        for head in range(len({name.split(".")[0] for name in tensors})):
            names = sorted(name for name in tensors if name.startswith(f"{head}.") and name.endswith(".linear.weight"))
            layers = [(runner.ops.prepare(tensors[name]), tensors[name.replace("weight", "bias")]) for name in names]
            self._heads.append((layers, runner.ops.prepare(tensors[f"{head}.{len(names)}.weight"])))

    def wants(self, rows: Sequence[EngineSequence], lengths: Lengths) -> list[tuple[EngineSequence, int]]:
        """Every sequence for which a draft pays."""
        return [(one, length) for one in rows if (length := lengths.of(one))]

    def draft(self, step: Step) -> None:
        """The likeliest token of each head."""
        drafting = sorted(step.drafting, key=lambda pair: -pair[1])
        sequences = [one for one, _ in drafting]
        states = self.states(sequences, [len(one.token_ids) - 1 for one in sequences])
        counts = np.array([most for _, most in drafting])
        for one in sequences:
            one.draft = []
        for place, (layers, head) in enumerate(self._heads[: int(counts[0])]):
            n = int((counts > place).sum())
            ops, x = self.runner.ops.step(n), states[:n]
            for weight, bias in layers:
                x = x + silu(ops.gemm(x, weight, bias))
            for one, token in zip(sequences, ops.gemm(x, head).argmax(-1).tolist(), strict=False):
                one.draft.append(token)


class EagleDrafter(HiddenDrafter, Chain):
    """A layer that takes a token's embedding and the hidden state before it, and gives the hidden state at the token.

    Its pages have the model's numbers; the entry of a token is written anew by each step that computes the token, from
    the model's own hidden state, where the draft had a guess.
    """

    reads: Reads = "all hidden states"

    def __init__(self, runner: ModelRunner, arch: Architecture, tensors: dict[str, torch.Tensor], ops: OpSet):
        Chain.__init__(self, runner, ops)
        HiddenDrafter.__init__(self, runner)
        model, layer = runner.model, "layers.0."
        parts = {name.removeprefix(layer): tensor for name, tensor in tensors.items() if name.startswith(layer)}
        join = [parts[f"self_attn.{part}_proj.weight"] for part in "qkv"]
        biases = [parts[f"self_attn.{part}_proj.bias"] for part in "qkv"] if arch.attention_bias else None
        norms = [parts.get(f"self_attn.{part}_norm.weight") for part in "qk"]
        one = torch.ones(arch.hidden_size, dtype=model.embedding.dtype, device=runner.device)
        weights = LayerWeights(
            one, torch.cat(join), None if biases is None else torch.cat(biases), norms[0], norms[1],
            parts["self_attn.o_proj.weight"], parts["post_attention_layernorm.weight"],
            torch.cat([parts["mlp.gate_proj.weight"], parts["mlp.up_proj.weight"]]), parts["mlp.down_proj.weight"],
        )  # fmt: skip
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
        hidden = self._hidden(inputs, ops, state)
        logits: torch.Tensor = self.runner.ops.step(len(hidden)).gemm(hidden, self.runner.model.lm_head)
        return logits, hidden

    def _hidden(self, inputs: StepInput, ops: Any, before: torch.Tensor) -> torch.Tensor:
        model, layer = self.model, self.model.layers[0]
        x = ops.embedding(inputs.token_ids, model.embedding) * self.runner.model.embedding_scale
        residual = x = ops.gemm(torch.cat([x, before], 1), self.fc, self.fc_bias)
        x = ops.gemm(model.attention(x, layer, inputs, self.cache.keys[0], self.cache.values[0], ops), layer.o)
        x, residual = ops.fused_add_rmsnorm(x, residual, layer.post_norm, model.arch.rms_norm_eps)
        hidden: torch.Tensor = ops.gemm(model.gated(x, layer.gate_up, ops), layer.down) + residual
        return hidden

    def follow(self, step: Step, inputs: StepInput, hidden: torch.Tensor | None, sizes: tuple[int, int, int]) -> None:
        """Writes the entries of all tokens of the step, from the hidden state before each."""
        assert hidden is not None, "the runner gives what the drafter reads"
        rows, n = self.runner.verified, len(inputs.seq_lens)
        decoding = self.runner.batch.rows if rows is None else rows.sequences
        sequences = [*decoding, *(chunk.sequence for chunk in step.chunks)]
        firsts, ends = np.arange(n), np.empty(0, np.int64)
        if inputs.chunks is not None:
            bounds = inputs.chunks.cu_seqlens.cpu().numpy().astype(np.int64) + n
            firsts, ends = np.concatenate([firsts, bounds[:-1]]), bounds[len(bounds) - len(step.chunks) :]
        positions = inputs.positions.cpu().numpy()[firsts].tolist()
        before = torch.cat([hidden[:1], hidden[:-1]])
        before[self._to(firsts)] = self.states(sequences, positions)
        self._hidden(replace(inputs, drawn=None), self.ops.step(*sizes), before)
        for chunk, end in zip(step.chunks, ends, strict=True):
            chunk.sequence.hidden = (chunk.end, hidden[end - 1])
        super().follow(step, inputs, hidden if inputs.drawn is None else hidden[inputs.drawn], sizes)

"""Builds the arguments of the op `sample`: the settings of each request as tensors, and the changes to the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from rooflab.engine.sequence import MOST_LOGPROBS
from rooflab.engine.sequence import Sequence as EngineSequence


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns the numpy `array` as a tensor on `device`.  A CPU needs no copy.

    On CUDA the copy runs in stream order from pinned memory.  A copy from pageable memory might wait for earlier work.
    Torch reuses pinned memory only after the copy."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.contiguous().pin_memory().to(device, non_blocking=True)


LEAST_TOP_P = 1e-7
"""The kernels' least `top_p`.  It keeps only the likeliest token, unless 10 million tokens are equally likely."""


class SamplingTensors:
    """Holds the arguments of the op `sample`, one value per row of logits, for one set of sequences.

    A sequence with `n` drafted tokens has `n + 1` rows.  `ahead(row)` returns the drafted tokens before a row's token.
    With `edits=False` the logits stay unchanged, and no log-probabilities are returned."""

    def __init__(
        self,
        sequences: Sequence[EngineSequence],
        device: torch.device,
        ahead: Callable[[int], list[int]] = lambda row: [],
        edits: bool = True,
    ):
        params = [sequence.params for sequence in sequences]
        self.special = [
            (row, sequence, ahead(row)) for row, sequence in enumerate(sequences) if edits and not sequence.params.plain
        ]
        """The rows whose logits are changed or shown, each with its sequence and the draft's tokens from `ahead`."""
        self._device = device

        def column(values: Iterable[float], dtype: type[np.generic]) -> torch.Tensor:
            return on_device(np.fromiter(values, dtype, len(sequences)), device)

        self._arguments = (
            column((p.temperature or 0.0 for p in params), np.float32),
            column((p.top_k or 0 for p in params), np.int32),
            column((1.0 if p.top_p is None else max(p.top_p, LEAST_TOP_P) for p in params), np.float32),
            column((p.min_p or 0.0 for p in params), np.float32),
            column((sequence.seed for sequence in sequences), np.int64),
        )
        self._factors: dict[str, torch.Tensor] = {}
        if any(sequence.params.penalised for _, sequence, _ in self.special):
            for name, default in {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}.items():
                self._factors[name] = column((getattr(p, name) or default for p in params), np.float32)
        logprob_rows = [row for row, sequence, _ in self.special if sequence.params.logprobs is not None]
        self._shown = on_device(np.array(logprob_rows, np.int64), device)

    def sample(
        self, kernel: Callable[..., torch.Tensor], logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Draws token ids `[B]`.  `positions` `[B]` int64 holds the index of each new token in its sequence.

        For rows that want log-probabilities, also returns two tensors `[rows, 1 + n]`: the ids of the drawn token and
        of the `n` likeliest tokens, and their log-probabilities from the unchanged logits."""
        token_ids = kernel(logits, *self._arguments, positions, **(self.edits() if self.special else {}))
        if not len(self._shown):
            return (token_ids,)
        all_logprobs = logits[self._shown].float().log_softmax(-1)
        likely_ids = all_logprobs.topk(min(MOST_LOGPROBS, all_logprobs.shape[1])).indices
        logprob_ids = torch.cat([token_ids[self._shown][:, None], likely_ids], 1)
        return token_ids, logprob_ids, all_logprobs.gather(1, logprob_ids)

    def edits(self) -> dict[str, torch.Tensor]:
        """Returns the arguments of the op `sample` that change logits: biases, end tokens that are not allowed yet, and
        counts of earlier tokens.  Only sequences with such sampling options have changes."""
        lengths = np.zeros(len(self._arguments[0]) + 1, np.int32)
        ids: list[int] = []
        token_counts: list[int] = []
        bias: list[float] = []
        for row, sequence, draft_tokens in self.special:
            params = sequence.params
            logit_changes = dict(params.logit_bias or {})
            if len(sequence.token_ids) + len(draft_tokens) - sequence.num_prompt_tokens < params.min_tokens:
                logit_changes |= dict.fromkeys(sequence.stop_ids, -np.inf)
            # Tokens with a change come first, in the order of their changes.
            count_by_id = dict.fromkeys(logit_changes, -1) | (sequence.counts if params.penalised else {})
            for token in draft_tokens if params.penalised else ():
                count_by_id[token] = max(count_by_id.get(token, 0), 0) + 1
            lengths[row + 1] = len(count_by_id)
            ids += count_by_id
            token_counts += count_by_id.values()
            bias += [*logit_changes.values(), *[0.0] * (len(count_by_id) - len(logit_changes))]
        if not ids:
            return {}
        columns = (np.array(ids, np.int32), np.array(token_counts, np.int32), np.array(bias, np.float32).view(np.int32))
        packed_arrays = on_device(np.concatenate([lengths.cumsum(dtype=np.int32), *columns]), self._device)  # one copy
        names = ("edit_offsets", "edit_ids", "edit_counts", "edit_bias")
        tensors = dict(zip(names, torch.split(packed_arrays, [len(lengths), *[len(ids)] * 3]), strict=True))
        return self._factors | tensors | {"edit_bias": tensors["edit_bias"].view(torch.float32)}

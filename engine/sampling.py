"""The arguments of a step's draw: each request's settings as tensors, and the edits of its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from rooflab.engine.sequence import MOST_LOGPROBS
from rooflab.engine.sequence import Sequence as EngineSequence


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On a CPU the array itself, without a copy; on CUDA a copy, made in turn with the device's work.

    It goes through pinned memory, which torch gives out again only when the copy is made; from other memory the copy
    may wait for all work before it, and torch copies what has gaps through such memory.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.contiguous().pin_memory().to(device, non_blocking=True)


LEAST_TOP_P = 1e-7
"""The kernels' least `top_p`: it keeps the likeliest token alone, unless 10 million tokens are equally likely."""


class SamplingTensors:
    """The arguments of `sample`, with a value for each row; made again when the batch has other sequences.

    A row draws the next token of its sequence, or one behind it: `ahead` gives the tokens of a draft that come before
    the draw of a row and are not its sequence's yet.  Without `edits` no logits are changed first, and none are shown.
    """

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
        """The rows whose logits are changed first, or shown, with their sequences and the tokens `ahead`."""
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
            for name, off in {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}.items():
                self._factors[name] = column((getattr(p, name) or off for p in params), np.float32)
        shown = [row for row, sequence, _ in self.special if sequence.params.logprobs is not None]
        self._shown = on_device(np.array(shown, np.int64), device)

    def sample(
        self, kernel: Callable[..., torch.Tensor], logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Token ids (B,) drawn at `positions` (B,) int64, the indices of the new tokens in their sequences.

        If rows are to be shown, also for these (rows, 1 + n) the drawn token and the likeliest by the logits as they
        came, and their log-probabilities.  The kernel's `top_n` would search all rows for them.
        """
        drawn = kernel(logits, *self._arguments, positions, **(self.edits() if self.special else {}))
        if not len(self._shown):
            return (drawn,)
        values = logits[self._shown].float().log_softmax(-1)
        likely = values.topk(min(MOST_LOGPROBS, values.shape[1])).indices
        ids = torch.cat([drawn[self._shown][:, None], likely], 1)
        return drawn, ids, values.gather(1, ids)

    def edits(self) -> dict[str, torch.Tensor]:
        """What the special rows change in their logits now, as arguments of `sample`: biases, end tokens that may not
        come yet, and the tokens that were there."""
        lengths = np.zeros(len(self._arguments[0]) + 1, np.int32)
        ids: list[int] = []
        counts: list[int] = []
        bias: list[float] = []
        for row, sequence, ahead in self.special:
            params = sequence.params
            changes = dict(params.logit_bias or {})
            if len(sequence.token_ids) + len(ahead) - sequence.num_prompt_tokens < params.min_tokens:
                changes |= dict.fromkeys(sequence.stop_ids, -np.inf)
            # Tokens with a change come first, in the order of their changes.
            there = dict.fromkeys(changes, -1) | (sequence.counts if params.penalised else {})
            for token in ahead if params.penalised else ():
                there[token] = max(there.get(token, 0), 0) + 1
            lengths[row + 1] = len(there)
            ids += there
            counts += there.values()
            bias += [*changes.values(), *[0.0] * (len(there) - len(changes))]
        if not ids:
            return {}
        columns = (np.array(ids, np.int32), np.array(counts, np.int32), np.array(bias, np.float32).view(np.int32))
        packed = on_device(np.concatenate([lengths.cumsum(dtype=np.int32), *columns]), self._device)  # one copy
        names = ("edit_offsets", "edit_ids", "edit_counts", "edit_bias")
        edits = dict(zip(names, torch.split(packed, [len(lengths), *[len(ids)] * 3]), strict=True))
        return self._factors | edits | {"edit_bias": edits["edit_bias"].view(torch.float32)}

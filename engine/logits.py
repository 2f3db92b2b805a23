"""What a request asks of its logits before a token is drawn, and the log-probabilities that it wants to see."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rooflab.engine.sequence import Sequence


def adjust(logits: torch.Tensor, rows: Iterable[tuple[int, Sequence]]) -> None:
    """Changes the given rows of `logits` (rows, vocab_size) in place, in vLLM's order: `logit_bias`, the end tokens
    that may not come before `min_tokens`, then the penalties of tokens that were there.

    The repetition penalty (Keskar et al., "CTRL", 2019) counts prompt and output, and divides a positive logit; the
    other two are OpenAI's and count the output.
    """
    for row, sequence in rows:
        params, own = sequence.params, logits[row]
        if params.logit_bias:
            own[[*params.logit_bias]] += torch.tensor([*params.logit_bias.values()]).to(own)
        if len(sequence.token_ids) - sequence.num_prompt_tokens < params.min_tokens and sequence.stop_ids:
            own[[*sequence.stop_ids]] = -torch.inf
        if params.repetition_penalty != 1:
            place = torch.tensor([*sequence.seen], device=own.device)
            values, penalty = own[place], params.repetition_penalty
            own[place] = torch.where(values > 0, values / penalty, values * penalty)
        if sequence.counts and (params.frequency_penalty or params.presence_penalty):
            place = torch.tensor([*sequence.counts], device=own.device)
            counts = torch.tensor([*sequence.counts.values()], device=own.device)
            own[place] -= (params.frequency_penalty * counts + params.presence_penalty).to(own.dtype)


def logprobs(logits: torch.Tensor, rows: Iterable[tuple[int, Sequence]]) -> list[tuple[Sequence, torch.Tensor]]:
    """The log-probabilities (vocab_size,), in fp32 and before `adjust`, of the rows whose requests want to see some."""
    wanted = [(row, sequence) for row, sequence in rows if sequence.params.logprobs is not None]
    return [(sequence, logits[row].float().log_softmax(-1)) for row, sequence in wanted]


def note_logprobs(found: Iterable[tuple[Sequence, torch.Tensor]], tokens: dict[int, int]) -> None:
    """Appends to each sequence the log-probabilities of its likeliest tokens, as many as it wants, and of the one that
    was drawn; `tokens` are those by request id."""
    for sequence, values in found:
        best = values.topk(sequence.params.logprobs or 0)
        kept = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        token = tokens[sequence.request_id]
        # A step that broke off after the draw is run again.
        del sequence.logprobs[len(sequence.token_ids) - sequence.num_prompt_tokens :]
        sequence.logprobs.append({token: float(values[token])} | kept)

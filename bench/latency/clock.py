"""The engine's own scheduler on a clock: it steps as in the engine, and each step takes as long as a model says.

Nothing is computed, so that 10,000 requests to a model of 70 billion parameters on eight GPUs take seconds on a laptop.
What comes out is a trace, as of a load on a server.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

from rooflab.bench.latency.step_model import StepModel, StepWork
from rooflab.bench.load.data import Prompt
from rooflab.bench.load.load_run import Plan
from rooflab.bench.load.metrics import summarize
from rooflab.bench.load.trace import Request, StreamEvent, Trace, phased
from rooflab.engine.block_manager import BlockManager
from rooflab.engine.core import Core
from rooflab.engine.options import check_sizes
from rooflab.engine.scheduler import Scheduler, Step
from rooflab.engine.sequence import SamplingParams
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.speculate.speculator import Speculator


@dataclass(frozen=True)
class ClockSettings:
    """The scheduler's settings, as those of `LLM`.  Raises `ValueError` as it does."""

    num_kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_chunk: int | None = None
    chunked_prefill: bool = True
    continuous_batching: bool = True
    prefix_caching: bool = False
    num_speculative_tokens: int = 0
    acceptance: float = 0.0
    """The chance that a drafted token is accepted if those before it were."""

    def __post_init__(self) -> None:
        check_sizes(
            block_size=self.block_size, max_num_seqs=self.max_num_seqs, prefill_chunk=self.prefill_chunk,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )  # fmt: skip
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance: expected a number in [0, 1], got {self.acceptance:g}")


class _Draw:
    """Made-up tokens: token 0 each, and token 1 after the accepted tokens of a draft."""

    read_at_once = False

    def __init__(self, sequences: list[EngineSequence], tokens: list[int]):
        self.sequences = sequences
        self._tokens = tokens

    def tokens(self) -> list[int]:
        return self._tokens


class _Drafter(Drafter):
    """Every sequence drafts as many tokens as it may."""

    def wants(self, rows: Sequence[EngineSequence], lengths: Lengths) -> list[tuple[EngineSequence, int]]:
        return [(one, lengths.most) for one in rows]

    def draft(self, drafting: Sequence[tuple[EngineSequence, int]]) -> dict[EngineSequence, list[int]]:
        return {one: [0] * most for one, most in drafting}


class _Runner:
    """In place of `SpeculativeRunner`: it keeps the batch, and says how long each step takes."""

    def __init__(self, model: StepModel, acceptance: float = 0.0, seed: int = 0):
        self.batch = SimpleNamespace(rows=list[EngineSequence](), set_blocks=lambda sequence: None)
        self.drafter = _Drafter()
        self.drafts: dict[EngineSequence, list[int]] = {}
        self._acceptance, self._random = acceptance, random.Random(seed)
        self.seconds = 0.0
        """Of the last step."""
        self.work = StepWork(0, 0)
        self._model = model

    def join(self, sequence: EngineSequence, source: int) -> None:
        sequence.row = len(self.batch.rows)
        self.batch.rows.append(sequence)

    def leave(self, sequence: EngineSequence) -> None:
        rows = self.batch.rows
        if sequence.row >= 0:
            rows[sequence.row] = rows[-1]
            rows[sequence.row].row = sequence.row
            rows.pop()
            sequence.row = -1

    def accept(self, tokens: Mapping[EngineSequence, list[int]]) -> None:
        pass

    def _accepted(self, drafted: int) -> int:
        return next((at for at in range(drafted) if self._random.random() >= self._acceptance), drafted)

    def run(self, step: Step) -> _Draw | None:
        rows, ended = self.batch.rows, step.ending
        keys = sum(len(sequence.token_ids) for sequence in rows)
        chunks = tuple((chunk.start, chunk.end) for chunk in step.chunks)
        drafted = sum(map(len, self.drafts.values()))
        self.work = StepWork(len(rows), keys, chunks, len(rows) + len(ended) + drafted, drafted)
        self.seconds = self._model.seconds(self.work)
        sequences: list[EngineSequence] = []
        tokens: list[int] = []
        for one in [*rows, *ended]:
            most = len(self.drafts.get(one, ()))
            accepted = self._accepted(most)
            sequences += [one] * (most + 1)
            tokens += [0] * accepted + [1] * (most + 1 - accepted)
        return _Draw(sequences, tokens) if sequences else None


def simulate(model: StepModel, plan: Plan, settings: ClockSettings, delay_s: float = 0.0) -> Trace:
    """The trace of a load on the clock.  `delay_s`: from a step's end until its tokens are at the client.

    Raises `ValueError` on a plan with a limit of requests on the client, on text, whose tokens only a server counts,
    and on a request that the KV cache cannot hold.
    """
    if plan.max_concurrency is not None or plan.data.ids is None or plan.data.dataset is not None:
        raise ValueError("plan: expected token ids of drawn lengths and no max_concurrency on the clock")
    prompts = plan.data.prompts(plan.seed)
    offsets = [0.0] * min(plan.concurrency, plan.num_prompts) if plan.arrivals is None else plan.offsets()
    waiting = [(offset, number) for number, offset in enumerate(offsets)]
    heapq.heapify(waiting)
    count = plan.num_prompts if plan.arrivals is None else len(offsets)
    asked = list(islice(prompts, count))
    blocks = BlockManager(settings.num_kv_blocks, settings.block_size, settings.prefix_caching)
    scheduler = Scheduler(
        blocks, settings.max_num_seqs, settings.max_num_batched_tokens, settings.prefill_chunk or 2**31,
        settings.chunked_prefill, settings.continuous_batching,
    )  # fmt: skip
    runner, most = _Runner(model, settings.acceptance, plan.seed), settings.num_speculative_tokens
    speculator = Speculator(cast(Any, runner), Lengths(most, adapts=False)) if most else None
    core = Core(scheduler, cast(Any, runner), speculator=speculator)
    due: list[float] = [0.0] * count
    times: list[list[float]] = [[] for _ in range(count)]
    started, now = len(offsets), 0.0
    while waiting or core.has_work:
        while waiting and waiting[0][0] <= now:
            due_s, number = heapq.heappop(waiting)
            due[number] = due_s
            sequence = _sequence(number, asked[number], due_s, settings.prefix_caching)
            scheduler.check(sequence)
            scheduler.submit(sequence)
        if not core.has_work:
            now = waiting[0][0]
            continue
        got = core.step()
        now += runner.seconds
        for sequence in got:
            times[sequence.request_id].append(now + delay_s)
            if sequence.finish_reason is not None and plan.arrivals is None and started < count:
                heapq.heappush(waiting, (now + delay_s, started))
                started += 1
    last = max(due, default=0.0)
    requests = phased(
        [
            Request(
                index=number, scheduled_s=due_s, free_s=due_s, sent_s=due_s, first_byte_s=own[0], end_s=own[-1],
                chunks=tuple(StreamEvent(time_s, "text", 1) for time_s in own), asked_prompt_tokens=prompt.tokens,
                asked_output_tokens=prompt.output_tokens, prompt_tokens=prompt.tokens, output_tokens=len(own),
                finish_reason="length",
            )
            for number, (prompt, due_s, own) in enumerate(zip(asked, due, times, strict=True))
        ],
        plan.warmup_s, last,
    )  # fmt: skip
    return Trace(0.0, plan.warmup_s, last, requests, {**plan.case(), "basis": model.basis, "seed": plan.seed})


def _sequence(number: int, prompt: Prompt, arrival_s: float, tokens_matter: bool) -> EngineSequence:
    length = prompt.tokens or 0
    ids = list(cast(Any, prompt.content)) if tokens_matter else [0] * length
    params = SamplingParams(max_tokens=prompt.output_tokens, ignore_eos=True)
    return EngineSequence(number, ids, length, params, 0, frozenset(), length + prompt.output_tokens, arrival_s)


def compared(simulated: Trace, measured: Trace) -> list[dict[str, Any]]:
    """A row for each figure of both traces: simulated, measured, and by how many percent the simulated is larger."""
    names = [f"{kind}_{q}_ms" for kind in ("ttft", "itl", "e2e") for q in ("p50", "p90", "p99")]
    ours, theirs = summarize(simulated), summarize(measured)
    return [
        {
            "figure": name,
            "simulated": ours[name],
            "measured": theirs[name],
            "off_%": 100 * (ours[name] / theirs[name] - 1) if theirs[name] else None,
        }
        for name in (*names, "output_tokens_per_s")
        if name in ours and name in theirs
    ]

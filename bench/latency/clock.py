"""Simulates a load: the engine's own scheduler makes steps on a simulated clock, and a model predicts their times.

No kernel runs.  So 10,000 requests to a model of 70 billion parameters take seconds on a laptop.  The result is a
trace, like that of a real server.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

from rooflab.bench.latency.step_model import KernelTimes, StepModel, StepWork
from rooflab.bench.load.data import Prompt
from rooflab.bench.load.load_run import Plan
from rooflab.bench.load.metrics import summarize
from rooflab.bench.load.trace import Request, StreamEvent, Trace
from rooflab.engine.block_manager import BlockManager
from rooflab.engine.core import Core
from rooflab.engine.options import check_sizes
from rooflab.engine.scheduler import Scheduler, Step
from rooflab.engine.sequence import SamplingParams, Sequence
from rooflab.roofline.llm import PREFILL_CHUNK_TOKENS, activation_bytes, kv_bytes_per_token, weight_bytes

MEMORY_FRACTION = 0.9
"""The share of a GPU's memory that the simulation uses, as in `roofline/llm.py`."""


@dataclass(frozen=True)
class ClockSettings:
    """Holds the scheduler's settings under `LLM`'s option names.  Raises `ValueError` on a size that `LLM` refuses."""

    num_kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_chunk: int | None = None
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        check_sizes(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            prefill_chunk=self.prefill_chunk,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def fitting(self, model: KernelTimes) -> ClockSettings:
        """Returns these settings with the largest number of KV-cache pages that fits beside weights and activations.

        Raises `ValueError` if not even one page fits."""
        token_limit = max(self.max_num_batched_tokens, PREFILL_CHUNK_TOKENS)
        used_bytes = weight_bytes(model.arch, model.weight_dtype, model.gpus)
        used_bytes += activation_bytes(model.arch, token_limit, self.max_num_seqs, model.weight_dtype, model.gpus)
        page_bytes = self.block_size * kv_bytes_per_token(model.arch, model.kv_dtype, model.gpus)
        page_count = int((MEMORY_FRACTION * model.device.hbm_bytes - used_bytes) / page_bytes)
        if page_count < 1:
            raise ValueError(f"gpus: expected room for the weights of {model.arch.name}, got {model.gpus}")
        return replace(self, num_kv_blocks=page_count)


class _Runner:
    """Replaces `ModelRunner` in a simulation: keeps the sequences of the batch, and computes the time of each step."""

    def __init__(self, model: StepModel):
        self.batch = SimpleNamespace(rows=list[Sequence]())
        self.seconds = 0.0
        """The seconds that the last step takes."""
        self._model = model

    def join(self, sequence: Sequence, source: int) -> None:
        sequence.row = len(self.batch.rows)
        self.batch.rows.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        batch_rows = self.batch.rows
        if sequence.row >= 0:
            batch_rows[sequence.row] = batch_rows[-1]
            batch_rows[sequence.row].row = sequence.row
            batch_rows.pop()
            sequence.row = -1

    def run(self, step: Step) -> SimpleNamespace | None:
        sequences = [*self.batch.rows, *step.ending]
        key_count = sum(len(batch_row.token_ids) for batch_row in self.batch.rows)
        chunk_bounds = tuple((step_chunk.start, step_chunk.end) for step_chunk in step.chunks)
        self.seconds = self._model.seconds(StepWork(len(self.batch.rows), key_count, chunk_bounds, len(sequences)))
        zero_ids = [0] * len(sequences)  # nothing is computed, so each token is 0
        return SimpleNamespace(sequences=sequences, read_at_once=False, tokens=lambda: zero_ids) if sequences else None


def _sequence(number: int, prompt: Prompt, arrival_s: float) -> Sequence:
    ids, run_params = list(cast(Any, prompt.content)), SamplingParams(max_tokens=prompt.output_tokens, ignore_eos=True)
    return Sequence(number, ids, len(ids), run_params, 0, frozenset(), len(ids) + prompt.output_tokens, arrival_s)


def simulate(model: StepModel, plan: Plan, settings: ClockSettings, delay_s: float = 0.0) -> Trace:
    """Simulates a load and returns its trace.  A step's tokens reach the client `delay_s` seconds after the step.

    Raises `ValueError` if the KV cache cannot hold a request, or on text prompts, because they have no token counts."""
    if plan.data.ids is None:
        raise ValueError("plan: expected token ids of drawn lengths on the clock")
    is_closed_loop = plan.rate is None
    arrival_offsets = [0.0] * min(plan.concurrency, plan.num_prompts) if is_closed_loop else plan.offsets()
    prompts = list(islice(plan.data.prompts(plan.seed), plan.num_prompts if is_closed_loop else len(arrival_offsets)))
    block_manager = BlockManager(settings.num_kv_blocks, settings.block_size, settings.prefix_caching)
    scheduler = Scheduler(
        block_manager, settings.max_num_seqs, settings.max_num_batched_tokens, settings.prefill_chunk or 2**31
    )
    model_runner = _Runner(model)
    engine_core = Core(scheduler, cast(Any, model_runner))
    # The times at which the next requests are due; a closed loop adds one at each end of a request.
    due_times, now_s = deque(arrival_offsets), 0.0
    arrivals, token_times = list[float](), [list[float]() for _ in prompts]
    while due_times or engine_core.has_work:
        while due_times and due_times[0] <= now_s:
            sequence = _sequence(len(arrivals), prompts[len(arrivals)], due_times[0])
            arrivals.append(due_times.popleft())
            scheduler.check(sequence)
            scheduler.submit(sequence)
        if not engine_core.has_work:
            now_s = due_times[0]
            continue
        sequences = engine_core.step()
        now_s += model_runner.seconds
        for sequence in sequences:
            token_times[sequence.request_id].append(now_s + delay_s)
            if sequence.finish_reason is not None and is_closed_loop and len(arrivals) + len(due_times) < len(prompts):
                due_times.append(now_s + delay_s)
    requests = [
        Request(
            index=request_index,
            scheduled_s=due_s,
            sent_s=due_s,
            first_byte_s=token_times_s[0],
            end_s=token_times_s[-1],
            chunks=tuple(StreamEvent(time_s, "text", 1) for time_s in token_times_s),
            asked_prompt_tokens=prompt.tokens,
            asked_output_tokens=prompt.output_tokens,
            prompt_tokens=prompt.tokens,
            output_tokens=len(token_times_s),
            finish_reason="length",
        )
        for request_index, (prompt, due_s, token_times_s) in enumerate(zip(prompts, arrivals, token_times, strict=True))
    ]
    last_arrival_s, case_fields = max(arrivals, default=0.0), {**plan.case(), "basis": model.basis, "seed": plan.seed}
    return Trace(0.0, last_arrival_s, tuple(requests), case_fields)


def compared(simulated: Trace, measured: Trace) -> list[dict[str, Any]]:
    """Compares two traces.  Returns, per metric, both values and the difference in percent of the measured value."""
    metric_names = [f"{latency_name}_{q}_ms" for latency_name in ("ttft", "itl", "e2e") for q in ("p50", "p90", "p99")]
    ours, measured_summary, rows = summarize(simulated), summarize(measured), []
    for name in (*metric_names, "output_tokens_per_s"):
        if name in ours and name in measured_summary:
            err_pct = 100 * (ours[name] / measured_summary[name] - 1) if measured_summary[name] else None
            rows.append({"figure": name, "simulated": ours[name], "measured": measured_summary[name], "off_%": err_pct})
    return rows

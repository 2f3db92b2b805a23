"""Runs the engine on prompts.  Returns the answers with TTFT and ITL, and makes a record of the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rooflab.bench.core import Environment, Record, RunWriter, tampered, why_noisy
from rooflab.engine.llm import LLM, RequestOutput, SamplingParams
from rooflab.engine.load.tokenizer import Prompt
from rooflab.engine.metrics import LatencySummary, TokenEvent, summarize
from rooflab.kernels._waiting import run_times, waiting_since
from rooflab.kernels.registry import CPU_BACKENDS

# Typical prompts for an assistant: short and long, questions and tasks.
PROMPT_SET = (
    "What is the capital of France?",
    "Explain why the sky is blue, in two sentences.",
    "Give me three tips for a good night's sleep.",
    "What is the difference between a list and a tuple in Python?",
    "Summarize this: The roofline model relates a program's operations per second to its arithmetic intensity, the "
    "operations it does for every byte it moves. Below the ridge point memory bandwidth limits it; above, arithmetic.",
    "Write a short story about a robot who learns to paint.",
    "Translate to French: Good morning, how are you?",
    "List the planets of the solar system from the sun outwards.",
)


def chat(text: str) -> list[dict[str, str]]:
    """Returns a chat with `text` as its only user message."""
    return [{"role": "user", "content": text}]


def as_prompt(llm: LLM, text: str, raw: bool = False) -> Prompt:
    """Returns `text` in the form that the model expects: as a chat message, or as the plain string."""
    return text if raw or not llm.tokenizer.has_chat_template else chat(text)


@dataclass(frozen=True)
class EngineRun:
    """Holds the answers of a run, and their latencies."""

    outputs: list[RequestOutput]
    summary: LatencySummary
    noise: str
    """Why the latencies are NOISY; empty if they are not."""
    fault: str = ""
    """Why the latencies are INVALID: the engine's clock was replaced, before the run or by its kernels."""

    @property
    def status(self) -> Literal["OK", "NOISY", "INVALID"]:
        return "INVALID" if self.fault else "NOISY" if self.noise else "OK"

    @property
    def reason(self) -> str:
        """Returns why the run's status is INVALID or NOISY.  Returns an empty text if the status is OK."""
        return self.fault or self.noise


def stream_one(llm: LLM, prompt: Prompt, params: SamplingParams, show: Callable[[TokenEvent], None]) -> EngineRun:
    """Runs one prompt.  Calls `show` with each token when the engine delivers the token."""
    clock_fault, old_run_times = tampered(), run_times()
    for token_event in llm.stream(prompt, params):
        show(token_event)
    llm_output = token_event.output
    assert llm_output is not None, "the last event of a request carries its output"
    return _run([llm_output], why_noisy(llm_output.timeline.itl_ms.tolist(), waiting_since(old_run_times)), clock_fault)


def run_batch(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> EngineRun:
    """Runs prompts that all arrive at once.  The run is NOISY only if its threads had to wait for a processor.
    Variation of the ITLs does not make it NOISY, because they always vary in such a run."""
    clock_fault, old_run_times = tampered(), run_times()
    outputs = llm.generate(list(prompts), params)
    return _run(outputs, why_noisy((), waiting_since(old_run_times)), clock_fault)


def _run(outputs: list[RequestOutput], noise: str, fault: str | None) -> EngineRun:
    summary = summarize(
        [llm_answer.timeline for llm_answer in outputs], sum(len(llm_answer.prompt_token_ids) for llm_answer in outputs)
    )
    return EngineRun(outputs, summary, noise, fault or tampered() or "")


def warm_up(llm: LLM, prompt_tokens: int = 32) -> None:
    """Runs a short request, so that no later TTFT contains allocation or, on a GPU, compilation."""
    prompt_length = max(1, min(prompt_tokens, llm.max_model_len - 5))
    token_ids = random.Random(0).choices(range(llm.arch.vocab_size), k=prompt_length)
    llm.generate([token_ids], SamplingParams(max_tokens=4, ignore_eos=True))


def engine_record(llm: LLM, run: EngineRun, name: str, case: Mapping[str, Any], run_id: str) -> Record:
    """Makes the record of a run, with the request, the model, the kernels and the latencies."""
    run_metrics = {metric_name: float(value) for metric_name, value in asdict(run.summary).items() if value is not None}
    return Record(
        kind="engine",
        run_id=run_id,
        status=run.status,
        reason=run.reason,
        **Environment.now(llm.device.index or 0).record_fields(),
        case_id=name,
        case={**case, "model": llm.arch.name, "dtype": llm.dtype_name, **kernel_names(llm)},
        device="cuda" if llm.device.type == "cuda" else "cpu",
        basis="measured",
        metrics=run_metrics,
    )


def kernel_names(llm: LLM) -> dict[str, str]:
    """Returns the kernel of each op.  If an op uses several kernels, their names are joined by `+`."""
    names_by_op: dict[str, dict[str, None]] = {}
    for op_row in llm.ops.describe():
        names_by_op.setdefault(op_row["op"], {})[op_row["kernel"]] = None
    return {op_name: "+".join(kernels) for op_name, kernels in names_by_op.items()}


def generate_one(
    llm: LLM, prompt: str, params: SamplingParams, raw: bool, show: Callable[[str], None], out: Path | None
) -> dict[str, Any]:
    """Answers one prompt, and shows the text as it comes.  Writes a record into the folder `out`, if it is given.

    The result has no times if Triton's interpreter runs kernels, because its times say nothing about the kernels."""
    has_times = llm.device.type != "cpu" or all(choice.kernel.backend in CPU_BACKENDS for choice in llm.ops.choices)
    if has_times:
        warm_up(llm)
    engine_run = stream_one(llm, as_prompt(llm, prompt, raw), params, lambda event: show(event.text))
    (request_output,) = engine_run.outputs
    result_row = {
        "model": llm.arch.name,
        "device": llm.device.type,
        "dtype": llm.dtype_name,
        "text": request_output["text"],
        "token_ids": request_output["token_ids"],
        "finish_reason": request_output["finish_reason"],
        "prompt_tokens": len(request_output.prompt_token_ids),
        "kernels": kernel_names(llm),
    }
    if has_times:
        result_row |= {**asdict(engine_run.summary), "status": engine_run.status, "reason": engine_run.reason}
        if out:
            writer = RunWriter(out)
            writer.write(engine_record(llm, engine_run, "generate", {"max_tokens": params.max_tokens}, writer.run_id))
    return result_row

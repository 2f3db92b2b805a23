"""The engine on a card, with random weights: TTFT, ITL and throughput at several batches, and two targets on them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from targets.measures import answer
from targets.target import AcceptanceTarget

from rooflab.bench.core.ceilings import ceilings_for
from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.core.timers.sm_clock import sm_clock_under_load
from rooflab.bench.engine.runs import EngineRun, engine_record, run_batch, warm_up
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.ops import FIRST_ON_CUDA
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.roofline.architecture import Architecture
from rooflab.roofline.device import identify
from rooflab.roofline.llm import weight_bytes
from rooflab.roofline.steps import step_ops

NEW_TOKENS = 32
"""The number of tokens generated for each request."""
PROMPT, TTFTS = 2048, 5
"""The tokens of the prompt of the target on TTFT, and the number of its runs, whose median counts."""
ITL_CONTEXT, ITL_TOKENS = 256, 128
"""The context at the end and the new tokens of the target on ITL: the keys are few bytes beside the weights."""
DRY_CONTEXT, DRY_NEW_TOKENS = 24, 4
DRY_CONFIG = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""A model small enough to run on a CPU in one second."""


class Runs:
    """An engine with random weights, its runs, and their records."""

    def __init__(self, context: Context, model: str, max_num_seqs: int, max_model_len: int):
        if context.dry_run:
            path = context.out / "dry-model" / "config.json"
            write_whole(path, json.dumps(DRY_CONFIG) + "\n")
            model, max_model_len = str(path), DRY_CONTEXT
        swaps = _swaps()
        self.llm = LLM(
            model,
            dummy=True,
            device=context.device,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            prefix_caching=False,
            seed=context.seed,
            swap=swaps,
            enforce_eager=bool(swaps),  # some of torch's kernels wait for the device
        )
        warm_up(self.llm, prompt_tokens=8)
        self.context = context
        self.writer, self.before = RunWriter.going_on(context.out)
        self.noise: list[str] = []
        """The reasons why latencies are NOISY."""
        self._random = random.Random(context.seed)

    @property
    def graphs(self) -> bool:
        """Whether decode steps run as CUDA graphs."""
        return self.llm.runner.graphs is not None

    def name(self, batch: int, context: int) -> str:
        """The name of the case of a run."""
        return f"batch {batch}, context {context}{'' if self.graphs else ', eager'}"

    def run(self, batch: int, prompt: int, new_tokens: int) -> EngineRun:
        """Runs `batch` requests of random tokens that arrive at the same time; writes a record."""
        if self.context.dry_run:
            prompt, new_tokens = DRY_CONTEXT - DRY_NEW_TOKENS, min(new_tokens, DRY_NEW_TOKENS)
        ids = range(self.llm.arch.vocab_size)
        prompts = [self._random.choices(ids, k=prompt) for _ in range(batch)]
        run = run_batch(self.llm, prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        case = {"batch": batch, "context": prompt + new_tokens, "new_tokens": new_tokens, "graphs": self.graphs}
        name = self.name(batch, prompt + new_tokens)
        self.writer.write(engine_record(self.llm, run, name, case, self.writer.run_id))
        self.noise += [run.noise] if run.noise else []
        return run


def _swaps() -> dict[str, str]:
    """For each op of which a kernel must not run, torch's kernel in place of the engine's choice."""
    lost = registry.excluded()
    failed = [op for op, names in FIRST_ON_CUDA.items() if any(f"{op}/{name}" in lost for name in names)]
    kept = {op: registry.kernels(op).get("library") for op in failed}
    return {op: "naive" if kernel is None or kernel.nondeterministic else "library" for op, kernel in kept.items()}


def engine(context: Context, model: str, batches: Sequence[int], contexts: Sequence[int]) -> EntryOutcome:
    """Measures TTFT, ITL and throughput of a model with random weights, one record for each batch at each context."""
    if context.dry_run:
        batches, contexts = batches[:1], (DRY_CONTEXT,)
    runs = Runs(context, model, max(batches), max(contexts))
    figures: dict[str, Any] = {}
    wanted = [(batch, length) for length in contexts for batch in batches]
    known = {record.case_id for record in runs.before}
    for batch, length in wanted:
        if context.left_s < 0:
            break
        if runs.name(batch, length) in known:
            figures[f"batch {batch}, context {length}"] = "measured before"
            continue
        run = runs.run(batch, length - NEW_TOKENS, NEW_TOKENS)
        summary, noisy = run.summary, ", NOISY" if run.noise else ""
        itl = "" if summary.itl_p50_ms is None else f", ITL {summary.itl_p50_ms:.2f} ms"
        told = f"TTFT {summary.ttft_p50_ms:.1f} ms{itl}, {summary.output_tokens_per_s:.0f} tokens/s{noisy}"
        figures[f"batch {batch}, context {length}"] = told
    left = len(wanted) - len(figures)
    reason = f"no time for {left} of {len(wanted)} runs" if left else ""
    return EntryOutcome("PARTIAL" if left else "DONE", reason, figures=figures)


def serving(context: Context, model: str, itl: float, ttft: float, batches: Sequence[int]) -> EntryOutcome:
    """Compares ITL of one sequence with the time to read the weights, and TTFT with the tensor peak; also measures
    decoding with and without graphs at `batches`, on which no target is set."""
    batches = batches[:1] if context.dry_run else batches
    runs = Runs(context, model, max(batches), PROMPT + NEW_TOKENS)
    arch, needed = runs.llm.arch, f"ITL share >= {itl:.2f}, TTFT share >= {ttft:.2f}"
    first = [runs.run(1, PROMPT, 1).summary.ttft_p50_ms for _ in range(TTFTS)]
    figures: dict[str, Any] = {"TTFT, ms": median(first)}
    for graphs in (True, False):
        if graphs and not runs.graphs:
            continue
        kept, runs.llm.runner.graphs = runs.llm.runner.graphs, runs.llm.runner.graphs if graphs else None
        told = "graphs" if graphs else "eager"
        figures[f"ITL, ms, {told}"] = runs.run(1, ITL_CONTEXT - ITL_TOKENS, ITL_TOKENS).summary.itl_p50_ms
        for batch in batches if context.left_s > 0 else ():
            gap = runs.run(batch, ITL_CONTEXT - ITL_TOKENS, ITL_TOKENS).summary.itl_p50_ms
            figures[f"decoded tokens/s, batch {batch}, {told}"] = 1e3 * batch / gap if gap else None
        runs.llm.runner.graphs = kept
    device = torch.device(context.device)
    ceilings = None if context.dry_run else ceilings_for(device)
    sheet = None if context.dry_run else identify(torch.cuda.get_device_name(device))
    read = (ceilings.access_bytes_per_s or {}).get("read") if ceilings and ceilings.kind == "measured" else None
    if sheet is None or read is None:
        return answer(context, False, needed, figures, "no bandwidth was measured on this card")
    clock = min(sm_clock_under_load(device), sheet.max_clock_hz)
    best = min(value for name, value in figures.items() if name.startswith("ITL"))
    peak = sheet.ceilings(clock).tensor_flops_per_s["bf16"]
    figures["ITL share"] = 1e3 * read_bytes(arch) / read / best
    figures["TTFT share"] = 1e3 * prompt_flops(arch, PROMPT) / peak / figures["TTFT, ms"]
    figures["sm_clock_mhz"] = clock / 1e6
    met = figures["ITL share"] >= itl and figures["TTFT share"] >= ttft
    return answer(context, met, needed, figures, "; ".join(dict.fromkeys(runs.noise)))


def read_bytes(arch: Architecture) -> int:
    """The bytes of the bf16 weights that a decode step reads: all but an embedding that is not the head too."""
    parts = arch.parameters()
    return weight_bytes(arch) - (2 * parts.embedding if parts.lm_head else 0)


def prompt_flops(arch: Architecture, prompt: int) -> float:
    """The tensor FLOPs that the engine computes for a prompt: after the last attention, only one token counts."""
    whole = sum(op.calls * sum(op.cost.tensor_flops.values()) for op in step_ops(arch, "prefill", 1, prompt))
    left_out = 2.0 * arch.hidden_size * (arch.num_heads * arch.head_dim + 3 * arch.intermediate_size)
    return whole - (prompt - 1) * left_out


ON_CUDA = tuple(FIRST_ON_CUDA)
MEASURED = {"batches": [1, 8, 64], "contexts": [512, 8192]}
TARGETS = (
    AcceptanceTarget(
        "bar:engine.llama-3.1-8b",
        "Llama-3.1-8B with random weights, bf16: ITL of one sequence >= 85% of the weights' bytes over measured read "
        "bandwidth, TTFT at 2,048 tokens >= 65% of the tensor peak at the clock held; graphs on and off",
        serving, {"model": "llama-3.1-8b", "itl": 0.85, "ttft": 0.65, "batches": [64, 256]}, 80.0, 80.0,
        checks=ON_CUDA,
    ),
    AcceptanceTarget(
        "engine:llama-3.1-8b", "TTFT, ITL and throughput of Llama-3.1-8B with random weights, bf16",
        engine, {"model": "llama-3.1-8b", **MEASURED}, 98.0, 57.0, checks=ON_CUDA,
    ),
    AcceptanceTarget(
        "engine:qwen3-0.6b", "TTFT, ITL and throughput of Qwen3-0.6B with random weights, bf16",
        engine, {"model": "qwen3-0.6b", **MEASURED}, 68.0, 56.0, checks=ON_CUDA,
    ),
)  # fmt: skip

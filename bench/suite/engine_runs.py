"""The engine by batch and context, on random weights: no model file is needed, and a token costs the same."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from rooflab.bench.measure.engine_run import engine_record, run_batch, warm_up
from rooflab.bench.records.files import RunWriter
from rooflab.bench.suite.entries import Context
from rooflab.bench.suite.state import write_whole
from rooflab.engine.llm import LLM, SamplingParams

NEW_TOKENS = 32
"""Tokens that each request is answered with."""
DRY_NEW_TOKENS, DRY_CONTEXT = 4, 24
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
"""A model small enough for a CPU and a second."""


def run_engine(
    context: Context, model: str, batches: Sequence[int], contexts: Sequence[int]
) -> tuple[dict[str, Any], tuple[str, ...], str]:
    """TTFT, ITL and throughput of each batch at each context, all requests arriving at once, as far as the time goes.

    Returns figures by run, the record file's name, and what was left out.
    """
    new_tokens = NEW_TOKENS
    if context.dry_run:
        model, batches, contexts, new_tokens = _dry_model(context), batches[:1], (DRY_CONTEXT,), DRY_NEW_TOKENS
    llm = LLM(
        model,
        dummy=True,
        device=context.device,
        max_num_seqs=max(batches),
        max_model_len=max(contexts),
        seed=context.seed,
    )
    warm_up(llm, prompt_tokens=8)
    writer = RunWriter(context.out)
    random_ids = random.Random(context.seed)
    figures: dict[str, Any] = {}
    runs = [(batch, length) for length in contexts for batch in batches]
    for batch, length in runs:
        if context.left_s < 0:
            left = len(runs) - len(figures)
            return figures, (writer.path.name,), f"no time for {left} of {len(runs)} runs"
        prompts = [random_ids.choices(range(llm.arch.vocab_size), k=length - new_tokens) for _ in range(batch)]
        _, summary = run_batch(llm, prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        case = {"batch": batch, "context": length, "new_tokens": new_tokens}
        name = f"batch {batch}, context {length}"
        writer.write(engine_record(llm, summary, name, case, writer.run_id))
        itl = "" if summary.itl_p50_ms is None else f", ITL {summary.itl_p50_ms:.2f} ms"
        figures[name] = f"TTFT {summary.ttft_p50_ms:.1f} ms{itl}, {summary.output_tokens_per_s:.0f} tokens/s"
    return figures, (writer.path.name,), ""


def _dry_model(context: Context) -> str:
    path = context.out / "dry-model" / "config.json"
    write_whole(path, json.dumps(DRY_CONFIG) + "\n")
    return str(path)

"""A small Llama for tests: its config on disk, and engines of random weights."""

import json
from pathlib import Path

import pytest
import torch

from rooflab.engine.llm import LLM

CONFIG = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def write_config(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder / "config.json"


def tiny_llm(folder: Path, config=None, **options) -> LLM:
    return LLM(write_config(folder, **(config or {})), dummy=True, device="cpu", **options)


def prompts(count=8, vocab=1024):
    """Token-id prompts of 1 to a few dozen tokens, each different."""
    return [[(7 * i + 13 * j + i * j) % vocab for j in range(1 + 5 * i)] for i in range(count)]


def tokens(outputs):
    return [output["token_ids"] for output in outputs]


def break_off_behind_the_draw(llm):
    """Runs a step that is interrupted when its tokens are drawn and not noted yet."""
    run = llm.runner.run

    def interrupted(step):
        run(step)
        raise KeyboardInterrupt

    llm.runner.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    llm.runner.run = run


def poisoned(llm):
    """Fills every page that nobody may read with NaN, after every step; a NaN that is read ends in the logits."""
    run, blocks = llm.runner.run, llm.scheduler.blocks
    caches = [*llm.runner.cache.keys, *llm.runner.cache.values]
    if (beside := getattr(llm.runner.drafter, "cache", None)) is not None:
        caches += [*beside.keys, *beside.values]
        for cache in caches:
            cache.fill_(torch.nan)

    def poisoning(step):
        free = torch.tensor(blocks._free, dtype=torch.int64)
        for cache in caches:
            cache[free] = torch.nan
        found = run(step)
        llm.scheduler.blocks.check(llm.scheduler.running)
        return found

    llm.runner.run = poisoning
    return llm


def with_graphs(llm):
    """`llm` with decode steps as graphs: later calls find new values in the tensors, and nothing else is new."""

    def record(function):
        function()
        return function

    graphs = llm.runner.decode_graphs()
    with torch.inference_mode():
        graphs.record(record)
    llm.runner.graphs = graphs
    return llm

"""A small Llama for tests: its config on disk, and engines with random weights."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from rooflab.engine.graphs import DecodeGraphs
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.weights import dummy_tensors
from rooflab.roofline.architecture import Architecture

CONFIG = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
STRETCHED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED["original_max_position_embeddings"] = 64


def write_config(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder / "config.json"


def byte_characters() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def write_model(folder: Path, **changes) -> Path:
    """A folder as transformers saves it: the config, tensors in two files, and a tokenizer of bytes with two merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    write_config(folder, **{"eos_token_id": [3], "dtype": "float32", **changes})
    names = [*byte_characters(), "ab", "abc"]
    backend = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.post_processor = processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", 258)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    tensors, files = dict(dummy_tensors(Architecture.from_config(folder))), [f"model-{n}.safetensors" for n in (1, 2)]
    places = {name: files[number % 2] for number, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def tiny_llm(folder: Path, config=None, **options) -> LLM:
    return LLM(write_config(folder, **(config or {})), dummy=True, device="cpu", **options)


def prompts(count=8, vocab=1024):
    """Token-id prompts of 1 to a few dozen tokens, each different."""
    return [[(7 * i + 13 * j + i * j) % vocab for j in range(1 + 5 * i)] for i in range(count)]


def tokens(outputs):
    return [output["token_ids"] for output in outputs]


def first_logits(llm, prompt):
    """The logits of the first token after a prompt."""
    kept, logits = [], llm.runner.logits
    llm.runner.logits = lambda step: kept.append(logits(step).float()) or kept[-1]
    llm.generate([prompt], SamplingParams(max_tokens=1))
    llm.runner.logits = logits
    return kept[0]


def check_pages(blocks, sequences):
    """Raises `AssertionError` unless every page is free, cached, or held by `sequences`, and is in one place alone."""
    held = Counter(block for sequence in sequences for block in sequence.block_ids)
    assert blocks.num_free == blocks.num_blocks - len(held), "a page is lost, or free and held"
    assert blocks.num_shared == sum(holders > 1 for holders in held.values()), "the number of shared pages is wrong"
    assert all(count == 1 for one in sequences for count in Counter(one.block_ids).values()), "a page is held twice"
    probe = SimpleNamespace(block_ids=[])
    blocks.grow(probe, (blocks.num_free - blocks.num_cached) * blocks.block_size)
    assert len(probe.block_ids) == len({*probe.block_ids} - held.keys()), "a page is free and held, or free twice"
    blocks.trim(probe, 0)


def poisoned(llm):
    """Fills every page that nobody may read with NaN, after every step; a NaN that is read ends in the logits."""
    run, blocks, probe = llm.runner.run, llm.scheduler.blocks, SimpleNamespace(block_ids=[])
    caches = [*llm.runner.cache.keys, *llm.runner.cache.values]
    if (beside := getattr(getattr(llm.runner, "drafter", None), "cache", None)) is not None:
        caches += [*beside.keys, *beside.values]
        for cache in caches:
            cache.fill_(torch.nan)

    def poisoning(step):
        blocks.grow(probe, (blocks.num_free - blocks.num_cached) * blocks.block_size)
        for cache in caches:
            cache[torch.tensor(probe.block_ids, dtype=torch.int64)] = torch.nan
        blocks.trim(probe, 0)
        found = run(step)
        check_pages(llm.scheduler.blocks, llm.scheduler.running)
        return found

    llm.runner.run = poisoning
    return llm


def with_graphs(llm):
    """`llm` with decode steps as graphs: later calls find new values in the tensors, and nothing else is new."""

    def record(function):
        function()
        return function

    runner = llm.runner
    rows, width = runner.batch.block_table.shape

    def forward(inputs):
        return runner.model.forward(inputs, runner.cache, runner.ops.step(len(inputs.seq_lens), 0))

    graphs = DecodeGraphs(forward, torch.empty(rows, llm.arch.vocab_size, dtype=llm.dtype), width)
    with torch.inference_mode():
        graphs.record(record)
    runner.graphs = graphs
    return llm

"""Shows what the engine reads from a model's files, and compares its tokens and probabilities with transformers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from rooflab.engine.llm import LLM
from rooflab.engine.load.checkpoints import open_checkpoint
from rooflab.engine.load.generation import read_generation
from rooflab.engine.load.model_files import path_of
from rooflab.engine.load.models import end_tokens
from rooflab.engine.load.tokenizer import Tokenizer
from rooflab.engine.sequence import SamplingParams

TEXTS = (
    "Hello world",
    " Hello",
    "  two",
    "Hello\n\nworld\t!",
    "3.14159 in 2026",
    "don't I'LL we've",
    "café Việt Ҥ ½",
    "中文 日本語 한국어",
    "🙂👩‍👩‍👧",
    "def f(x):\n    return x ** 2\n",
    "a" * 40,
)
LOGPROB_COUNT = 20
MAX_GAP = 0.01
"""The largest allowed difference of fp32 log-probabilities.  Correct: at most 0.001.  With a wrong rotation: nats."""


def understood(model: str) -> list[dict[str, Any]]:
    """Returns a row for each fact that the engine read from a model's files. Raises `ValueError` on a refused model."""
    model_path = path_of(model)
    checkpoint, tokenizer = open_checkpoint(model_path), Tokenizer(model_path)
    ends_by_source = {"the tokenizer": tokenizer.eos_token_id, **checkpoint.ends()}
    end_ids = sorted(end_tokens(ends_by_source, checkpoint.architecture.vocab_size))
    rows = [*asdict(checkpoint.architecture).items()]
    rows += [("parameters", checkpoint.architecture.parameters().total), ("tokens", tokenizer.size)]
    rows += [(f"tokens of {TEXTS[0]!r}", tokenizer.encode(TEXTS[0])), ("chat template", tokenizer.has_chat_template)]
    rows += [("end tokens", ", ".join(f"{token} {tokenizer.named(token)[0]}" for token in end_ids) or "none")]
    rows += [(f"end tokens of {end_source}", tokens) for end_source, tokens in ends_by_source.items()]
    rows += [*read_generation(*checkpoint.generation()).items()]
    return [
        {"what": name, "understood": value if isinstance(value, int | float) else str(value)} for name, value in rows
    ]


def differences(model: str) -> Iterator[dict[str, Any]]:
    """Compares the engine with transformers, and yields two rows: one for the token ids of `TEXTS`, one for the
    log-probabilities of the likeliest next tokens of two prompts.  Raises `ValueError` if transformers cannot load the
    files."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    model_path = path_of(model)
    hf_path = model_path.parent if model_path.is_file() else model_path
    hf_options = {"local_files_only": True} | ({"gguf_file": model_path.name} if model_path.is_file() else {})
    tokenizer = Tokenizer(model_path)
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a GGUF's conversion draws its own progress bar
            hf_tokenizer = AutoTokenizer.from_pretrained(hf_path, **hf_options)
            hf_model = AutoModelForCausalLM.from_pretrained(hf_path, dtype=torch.float32, **hf_options).eval()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, StrictDataclassError) as error:
        raise ValueError(f"model: transformers cannot load it: {' '.join(str(error).split()):.200}") from error
    encodings = [(text, tokenizer.encode(text), hf_tokenizer(text)["input_ids"]) for text in TEXTS]
    mismatches = [f"{text!r}: {our_ids}, there {hf_ids}" for text, our_ids, hf_ids in encodings if our_ids != hf_ids]
    yield {"what": "tokens", "of": len(encodings), "differ": len(mismatches), "first": "".join(mismatches[:1])}
    llm = LLM(model, dtype="float32", device="cpu")
    prompts = [tokenizer.encode(text) for text in TEXTS[:2]]
    gaps = [(prompt, _gap(llm, hf_model, prompt)) for prompt in prompts]
    mismatches = [f"{prompt}: {logprob_gap:.3g}" for prompt, logprob_gap in gaps if logprob_gap > MAX_GAP]
    yield {"what": "log-probabilities", "of": len(gaps), "differ": len(mismatches), "first": "".join(mismatches[:1])}


@torch.inference_mode()
def _gap(llm: LLM, other: Any, prompt: list[int]) -> float:
    """Returns the largest difference in likely next tokens' log-probabilities between the engine and another model."""
    answer = llm.generate([prompt], SamplingParams(max_tokens=1, logprobs=LOGPROB_COUNT, ignore_eos=True))[0].outputs[0]
    assert answer.logprobs is not None, "they were asked for"
    hf_logprobs = other(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    return max(abs(float(hf_logprobs[token]) - our_logprob) for token, our_logprob in answer.logprobs[0].items())

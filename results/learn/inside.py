"""Records one run of SmolLM2-135M: its tokens, times and probabilities, and what its layers compute."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rooflab.bench.latency.ledger import measured
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.models import open_model
from rooflab.reference import llama
from rooflab.roofline.architecture import PRESETS, Architecture

MODEL, QUESTION = "smollm2-135m", "What is the capital of France?"
CHAT, RUNS = [{"role": "user", "content": QUESTION}], 6
LAYER, HEAD, MLP_LAYER = 23, 4, 15  # from the last token of the prompt, this head looks at France
TEXTS = Path(__file__).with_name("texts.txt").read_text().splitlines()
COLUMNS = ("op", "site", "kernel", "calls", "ms", "MB")


class TensorWatch(TorchFunctionMode):
    """Keeps the arguments and the result of each call of a torch function, as an attribute with the function's name."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        vars(self).setdefault(function.__name__, []).append((args, result))
        return result


def files() -> dict[str, dict[str, Any]]:
    """Returns the contents of the data files by their names."""
    arch, tokenizer, weights, *_ = open_model(MODEL, False, 0, torch.device("cpu"))
    tensors: dict[str, Any] = dict(weights)
    names = [tokenizer.named(i)[0] for i in range(arch.vocab_size)]
    with TensorWatch() as watch:
        logits = llama.logits(arch, tensors, tokenizer.encode(CHAT))[-1]
    below = (256 * (logits.max() - logits)).round().int().tolist()
    return {
        "run.json": run_of(LLM(MODEL, max_model_len=512, max_num_seqs=4, prefix_caching=False), names),
        "models.json": {"models": {n: {**asdict(a), "parameters": asdict(a.parameters())} for n, a in PRESETS.items()}},
        "neighbours.json": {"tokens": neighbours(tensors["model.embed_tokens.weight"], names)},
        "inside.json": {"rope": {"theta": arch.rope_theta, "size": arch.head_dim}, **inside(vars(watch))},
        "vocabulary.json.gz": vocabulary(tokenizer, names),
        "attention.json.gz": {"texts": [attention(arch, tensors, tokenizer.encode(text), names) for text in TEXTS]},
        "logits.json.gz": {"largest": float(logits.max()), "below": below},
    }


def run_of(llm: LLM, names: list[str]) -> dict[str, Any]:
    """Returns tokens, times (ms) and likeliest tokens of the quickest run, and the ops of two steps."""
    output = min((llm.generate([CHAT])[0] for _ in range(RUNS)), key=lambda one: one.timeline.e2e_ms)
    likely = llm.generate([CHAT], SamplingParams(logprobs=5))[0].outputs[0].logprobs
    times = [output.timeline.ttft_ms, *output.timeline.itl_ms.tolist()]
    return {
        "model": llm.arch.name, "dtype": llm.dtype_name, "device": llm.device.type, "runs": RUNS,
        "block_size": llm.scheduler.blocks.block_size, "question": QUESTION, "text": output["text"],
        "finish_reason": output["finish_reason"], "prompt": [[i, names[i]] for i in output.prompt_token_ids],
        "answer": [[i, names[i]] for i in output["token_ids"]], "ttft_ms": times[0],
        "itl_ms": sorted(times[1:])[len(times[1:]) // 2], "e2e_ms": output.timeline.e2e_ms,
        "steps": [
            {"ms": ms, "token": token, "top": [[i, names[i], math.exp(p)] for i, p in list(top.items())[:5]]}
            for ms, token, top in zip(times, output["token_ids"], likely or [], strict=True)
        ],
        "ledger": {
            kind: {name: getattr(ledger, name) for name in ("context", "step_ms", "host_ms", "noise")}
            | {"head": COLUMNS, "rows": [[row[c] for c in COLUMNS] for row in ledger.table() if "kernel" in row]}
            for kind in ("prefill", "decode")
            for ledger in [measured(llm, kind, 1, len(output.prompt_token_ids))]
        },
    }  # fmt: skip


def neighbours(embedding: torch.Tensor, names: list[str]) -> list[Any]:
    """Returns id, text and the 8 nearest tokens (text, cosine) of 500 common words: those merged first."""
    kinds = (" [a-z]{6,}", " [A-Z][a-z]{4,}")
    words = [i for kind in kinds for i in [i for i, name in enumerate(names) if re.fullmatch(kind, name)][:250]]
    unit = embedding / embedding.norm(dim=-1, keepdim=True)
    cosines, near = (unit[words] @ unit.T).topk(9)  # the first is the word itself
    rows = zip(words, cosines.tolist(), near.tolist(), strict=True)
    return [[i, names[i], [[names[j], round(c, 4)] for j, c in zip(ids, cos, strict=True)][1:]] for i, cos, ids in rows]


def attention(arch: Architecture, tensors: llama.Tensors, tokens: list[int], names: list[str]) -> dict[str, Any]:
    """Returns the tokens and all weights in thousandths, by layer, head, query, and key up to the query."""
    with TensorWatch() as watch:
        llama.logits(arch, tensors, tokens)
    weights = torch.stack([result for _, result in vars(watch)["softmax"]])
    lower = torch.tril_indices(len(tokens), len(tokens))
    thousandths = (1000 * weights[..., *lower]).round().int().flatten().tolist()
    return {"tokens": [names[i] for i in tokens], "thousandths": thousandths}


def inside(calls: Any) -> dict[str, Any]:
    """Returns one head's weights, query and key, the norms of the residual, and a histogram of one layer's gate."""
    heads, gate = [args[0] for args, _ in calls["chunk"]], calls["silu"][MLP_LAYER][0][0]
    query, key = heads[2 * LAYER][HEAD, -1], heads[2 * LAYER + 1][HEAD // 3, 29]  # of the last token and of France
    return {
        "layer": LAYER, "head": HEAD, "mlp_layer": MLP_LAYER, "query": query.tolist(), "key": key.tolist(),
        "weights": [row[: i + 1].tolist() for i, row in enumerate(calls["softmax"][LAYER][1][HEAD])],
        "residual": [args[0].norm(dim=-1).tolist() for args, _ in calls["square"]],
        "gate": {"from": -8, "width": 0.5, "counts": gate.clamp(-8, 7.99).histc(32, -8, 8).int().tolist()},
    }  # fmt: skip


def vocabulary(tokenizer: Any, names: list[str]) -> dict[str, Any]:
    """Returns the special tokens, the bytes of the tokens after them, and the pairs that make the other tokens."""
    model = json.loads(tokenizer._tokenizer.backend_tokenizer.to_str())["model"]
    left, right = ([model["vocab"][part] for part in side] for side in zip(*model["merges"], strict=True))
    special, first = len(tokenizer.special), len(names) - len(left)
    plain = [tokenizer.named(i)[1][0] for i in range(special, first)]
    return {"special": names[:special], "bytes": plain, "left": left, "right": right}

"""What transformers says about the same GGUF: greedy continuations and teacher-forced logits, in fp32."""

from pathlib import Path
from types import SimpleNamespace

import torch

from rooflab.engine.llm import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
NEW_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about rain.",
)
# Around the block size of 16, and long enough for many pages.
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 128, 600)


def load_transformers(path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM, GgufConfig

    # Without this transformers keeps the weights quantised and multiplies with them as they are.
    plain = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=plain
    ).eval()


def real_prompts(tokenizer):
    """Chat questions through the template, and the licence's first so many tokens."""
    text = tokenizer.encode((ROOT / "LICENSE").read_text())
    chats = [tokenizer.encode([{"role": "user", "content": question}]) for question in QUESTIONS]
    return chats + [text[:length] for length in LENGTHS]


@torch.inference_mode()
def continuations_and_logits(model, prompts, new_tokens=NEW_TOKENS):
    """Per prompt, transformers' greedy tokens (EOS ignored) and the logits that they were taken from."""
    results = []
    for prompt in prompts:
        cache, inputs, tokens, logits = None, torch.tensor([prompt]), [], []
        for _ in range(new_tokens):
            out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, last = out.past_key_values, out.logits[0, -1]
            tokens.append(int(last.argmax()))
            logits.append(last)
            inputs = torch.tensor([tokens[-1:]])
        results.append((tokens, torch.stack(logits)))
    return results


@torch.inference_mode()
def teacher_forced(llm: LLM, prompts, continuations):
    """The engine's logits (new_tokens, V) per prompt when every drawn token is replaced by the given one.

    The engine runs as it always does; only `sample` is another function, which tells requests apart by their seed.
    """
    lengths = [len(prompt) for prompt in prompts]
    seen = [{} for _ in prompts]

    def forced(logits, temperature, top_k, top_p, min_p, seed, position):
        tokens = []
        for row, (request, where) in enumerate(zip(seed.tolist(), position.tolist(), strict=True)):
            index = where - lengths[request]
            assert index not in seen[request], "a position was computed twice"
            seen[request][index] = logits[row].clone()
            tokens.append(continuations[request][index])
        return torch.tensor(tokens)

    steps = dict(llm.ops._steps)
    llm.ops._steps = {name: SimpleNamespace(**{**vars(step), "sample": forced}) for name, step in steps.items()}
    try:
        count = len(continuations[0])
        params = [SamplingParams(max_tokens=count, ignore_eos=True, seed=i) for i in range(len(prompts))]
        outputs = llm.generate([list(prompt) for prompt in prompts], params)
    finally:
        llm.ops._steps = steps
    assert [out["token_ids"] for out in outputs] == [list(tokens) for tokens in continuations]
    return [torch.stack([logits[i] for i in range(count)]) for logits in seen]

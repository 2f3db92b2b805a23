"""Generated configs: each gives the logits of transformers or is refused by a sentence; none is another model."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_model import CONFIG

from rooflab.engine.weights import dummy_tensors, load_weights
from rooflab.reference import llama
from rooflab.roofline.architecture import Architecture

COUNT = 60
"""Of each family."""
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VALUES: dict[str, list[Any]] = {
    "rope_theta": [500.0, 1e6, 0, -1.0, "x"],
    "rope_scaling": [None, {"type": "linear", "factor": 3.0}, {"rope_type": "linear"}, YARN, {**YARN, "beta_fast": 8},
                     {"rope_type": "dynamic", "factor": 2.0}, {**YARN, "mscale": 2.0}, {"type": "default"}],
    "rms_norm_eps": [1e-2, 0.5, "x", -1],
    "sliding_window": [None, 5, 300, 0, "9", 4.5],
    "use_sliding_window": [True, False],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention", "sliding_attention"],
                    ["linear_attention"] * 2, ["full_attention"]],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu"],
    "head_dim": [32, 16, 64, None],
    "num_key_value_heads": [1, 2, 3, 6, None],
    "num_attention_heads": [3, 6, 12, 5],
    "hidden_size": [192, 96],
    "tie_word_embeddings": [True, False, None],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "partial_rotary_factor": [0.5, 1.0],
    "max_position_embeddings": [8, 64, 1024],
    "final_logit_softcapping": [30.0, None],
    "num_experts": [0, 8],
}  # fmt: skip


def changed(base: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The base with one to three keys dropped or of other values."""
    found = deepcopy(base)
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.15:
            found.pop(draw.choice([key for key in found if key != "model_type"]), None)
        else:
            key = draw.choice(list(VALUES))
            found[key] = deepcopy(draw.choice(VALUES[key]))
    return found


@pytest.mark.more
@pytest.mark.parametrize("family", BASES)
def test_a_generated_config_gives_the_logits_of_transformers_or_is_refused(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    draw, base = random.Random(family), {**CONFIG, "model_type": family, **BASES[family]}
    weights = dict(dummy_tensors(Architecture.from_config(base, name="tiny")))
    prompt, loaded = [(37 * place) % 1024 for place in range(40)], 0
    for _ in range(COUNT):
        config = changed(base, draw)
        try:
            arch = Architecture.from_config(config, name="tiny")
            load_weights(arch, weights.items(), torch.float32, torch.device("cpu"))
        except ValueError as refused:
            assert str(refused), config
            continue
        try:
            known = AutoConfig.for_model(**deepcopy(config))
            model = AutoModelForCausalLM.from_config(known, dtype=torch.float32).eval()
        except (StrictDataclassError, KeyError, TypeError):
            continue  # it is stricter about what it does not use, and needs a rope_theta
        missing, unknown = model.load_state_dict(weights, strict=False)
        model.tie_weights()
        assert not unknown and set(missing) <= {"lm_head.weight"}, config
        ours = llama.logits(arch, weights, prompt[: min(40, arch.max_position)])
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt[: min(40, arch.max_position)]])).logits[0]
        assert float((ours - theirs).abs().max()) <= 1e-4, config
        loaded += 1
    assert COUNT / 10 < loaded < COUNT, "both happen"

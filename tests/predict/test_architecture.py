"""The model description: published configurations, and configurations that are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooflab.roofline.architecture import PRESETS, Architecture, get_architecture

LLAMA_8B, LLAMA_70B = PRESETS["llama-3.1-8b"], PRESETS["llama-3.1-70b"]


def llama_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": dict(LLAMA_8B.rope_scaling or {}),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}


def test_parameter_counts_are_the_published_ones() -> None:
    for name, total in [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ]:
        assert PRESETS[name].parameters().total == total


def test_qwen2_has_biases_on_q_k_v_alone() -> None:
    # Qwen2.5-0.5B has 494,032,768 parameters.
    config = llama_config(
        model_type="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        rope_scaling=None,
        sliding_window=32768,
        use_sliding_window=False,
    )
    arch = Architecture.from_config(config)
    assert arch.attention_bias and not arch.qk_norm
    assert arch.parameters().total == 494_032_768


def test_from_config_by_path(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config()))
    for path in (folder, folder / "config.json"):
        assert get_architecture(str(path)) == replace(LLAMA_8B, name="my-llama")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        get_architecture(str(folder))


def test_an_unknown_model_lists_the_presets() -> None:
    assert get_architecture("Llama-3-70B") is LLAMA_70B
    with pytest.raises(ValueError, match="model: expected one of llama-3.1-8b, .*, or a config.json, got 'llama-9'"):
        get_architecture("llama-9")


def test_from_config_reads_both_spellings_of_rope_and_fills_in_what_is_left_out() -> None:
    theirs = {"rope_theta": 500000.0, **(LLAMA_8B.rope_scaling or {})}
    new = llama_config(rope_theta=..., rope_scaling=..., rope_parameters=theirs)
    for config in (llama_config(), new):
        assert Architecture.from_config(config, name="llama-3.1-8b") == LLAMA_8B
    old = Architecture.from_config(llama_config(rope_scaling={"type": "linear", "factor": 2.0}))
    assert old.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    arch = Architecture.from_config(llama_config(num_key_value_heads=..., torch_dtype=..., rope_scaling=...))
    assert (arch.num_kv_heads, arch.head_dim, arch.dtype, arch.rope_scaling) == (32, 128, "bf16", None)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "brand_new", "num_experts": 64}, "brand_new: mixture of experts"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3: multi-head latent attention"),
        ({"model_type": "mamba2"}, "mamba2: a state-space model"),
        ({"model_type": "jamba"}, "jamba: a hybrid of attention and recurrent layers"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "llama: a hybrid of attention"),
        ({"model_type": "gemma2"}, "gemma2: sliding-window attention in some layers"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "qwen2: sliding-window attention in some layers"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, "llama: sliding-window attention in some"),
        ({"sliding_window": 512}, "llama: sliding_window 512"),
        ({"attn_logit_softcapping": 50.0}, "llama: attn_logit_softcapping 50.0"),
        ({"hidden_act": "gelu"}, "llama: hidden_act 'gelu'"),
        ({"attention_bias": True}, "llama: attention_bias"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 2.0}}, "rope scaling yarn: mscale"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"{what}.* is not modelled"):
        Architecture.from_config(llama_config(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types of 32 layers, got 2"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling linear, llama3, .* got 'longrope'"),
        ({"model_type": "gpt2"}, "one of llama, mistral, qwen2, qwen3, gemma, got 'gpt2'"),
        ({"num_key_value_heads": 5}, "a divisor of 32 heads, got 5"),
        ({"head_dim": 15}, "an even number, .*got 15"),
        ({"vocab_size": "32000"}, "an integer 'vocab_size' in config.json, got '32000'"),
        ({"rms_norm_eps": -1}, "a finite 'rms_norm_eps' above 0 in config.json, got -1"),
        ({"num_attention_heads": 0}, "at least 1, got 0"),
        ({"tie_word_embeddings": "true"}, "true or false as 'tie_word_embeddings' in config.json, got 'true'"),
        ({"num_hidden_layers": 10**9}, "at most 10000 as 'num_hidden_layers' in config.json, got 1000000000"),
        ({"torch_dtype": "int4"}, "one of bfloat16, float16, .* in config.json, got 'int4'"),
        ({"vocab_size": ...}, "config.json has no 'vocab_size'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling yarn misses factor"),
    ],
)
def test_a_value_that_is_missing_or_makes_no_sense_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Architecture.from_config(llama_config(**changes))


QWEN3 = {"model_type": "qwen3", "sliding_window": 17, "use_sliding_window": True, "max_window_layers": 32}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 512}, 512),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": 131072}, None),
        ({"model_type": "qwen2", "sliding_window": 512}, None),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0}, 512),
        ({**QWEN3, "layer_types": ["full_attention"] * 32}, None),
        ({**QWEN3, "layer_types": ["sliding_attention"] * 32}, 17),
        ({"layer_types": ["full_attention"] * 32, "rope_interleaved": False, "attention_dropout": 0.1}, None),
    ],
)
def test_windows_are_those_of_transformers(changes: dict[str, Any], window: int | None) -> None:
    assert Architecture.from_config(llama_config(**changes)).window == window

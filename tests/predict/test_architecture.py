"""The model description: published configurations, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooflab.roofline.architecture import PRESETS, Architecture, get_architecture

LLAMA_8B, LLAMA_70B = PRESETS["llama-3.1-8b"], PRESETS["llama-3.1-70b"]


def llama_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rope_scaling": dict(LLAMA_8B.rope_scaling or {}), "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
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


def test_parameters_by_part() -> None:
    parts = LLAMA_8B.parameters()
    assert parts.embedding == parts.lm_head == 128_256 * 4096
    assert parts.attention == 32 * 4096 * (4096 + 2 * 1024 + 4096)
    assert parts.mlp == 32 * 3 * 4096 * 14336
    assert parts.norms == 65 * 4096
    assert PRESETS["qwen3-0.6b"].parameters().lm_head == 0


def test_qwen2_has_biases_on_q_k_v_alone() -> None:
    # Qwen2.5-0.5B has 494,032,768 parameters.
    config = llama_config(
        model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, rope_scaling=None, sliding_window=32768,
        use_sliding_window=False,
    )  # fmt: skip
    arch = Architecture.from_config(config)
    assert arch.attention_bias and not arch.qk_norm
    assert arch.parameters().total == 494_032_768


def test_from_config_gives_the_preset() -> None:
    assert Architecture.from_config(llama_config(), name="llama-3.1-8b") == LLAMA_8B


def test_from_config_reads_both_spellings_of_rope() -> None:
    theirs = {"rope_theta": 500000.0, **(LLAMA_8B.rope_scaling or {})}
    new = llama_config(rope_theta=..., rope_scaling=..., rope_parameters=theirs)
    assert Architecture.from_config(new, name="llama-3.1-8b") == LLAMA_8B
    plain = Architecture.from_config(llama_config(rope_scaling={"rope_type": "default"}))
    assert plain.rope_scaling is None
    old = Architecture.from_config(llama_config(rope_scaling={"type": "linear", "factor": 2.0}))
    both = Architecture.from_config(llama_config(rope_scaling={"type": "linear", **(old.rope_scaling or {})}))
    assert both.rope_scaling == old.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_from_config_fills_in_what_a_config_leaves_out() -> None:
    arch = Architecture.from_config(llama_config(num_key_value_heads=..., torch_dtype=..., rope_scaling=...))
    assert (arch.num_kv_heads, arch.head_dim, arch.dtype, arch.rope_scaling) == (32, 128, "bf16", None)


def test_from_config_by_path(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config()))
    for path in (folder, folder / "config.json"):
        assert get_architecture(str(path)) == replace(LLAMA_8B, name="my-llama")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        get_architecture(str(folder))


def test_what_is_not_modelled_is_refused_by_name() -> None:
    for changes, message in [
        ({"model_type": "mixtral"}, "mixtral: mixture of experts is not modelled yet"),
        ({"model_type": "brand_new", "num_experts": 64}, "brand_new: mixture of experts is not modelled yet"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3: multi-head latent attention is not modelled yet"),
        ({"model_type": "brand_new", "kv_lora_rank": 512}, "brand_new: multi-head latent attention is not"),
        ({"model_type": "mamba2"}, "mamba2: a state-space model is not modelled yet"),
        ({"model_type": "jamba"}, "jamba: a hybrid of attention and recurrent layers is not modelled yet"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "llama: a hybrid of attention"),
        ({"model_type": "gemma2"}, "gemma2: sliding-window attention in some layers is not modelled yet"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "qwen2: sliding-window attention in some layers"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, "llama: sliding-window attention in some"),
        ({"layer_types": ["chunked_attention"] * 32}, "llama: sliding-window attention in some layers"),
        ({"layer_types": ["full_attention"] * 2}, "llama: expected layer_types of 32 layers, got 2"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, "mistral: sliding-window attention"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32}, "qwen3: sliding-window attention"),
        ({"model_type": "mistral", "sliding_window": "x"}, "expected an integer 'sliding_window' in config.json"),
        ({"sliding_window": 512}, "llama: sliding_window 512 is not modelled yet"),
        *(
            ({key: value}, f"llama: {key} {value!r} is not modelled yet")
            for key, value in {
                "attn_logit_softcapping": 50.0,
                "query_pre_attn_scalar": 256,
                "rope_local_base_freq": 1e4,
                "logit_scale": 0.1,
                "residual_multiplier": 0.2,
                "rope_interleaved": True,
                "expert_count": 8,
            }.items()
        ),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "expected rope scaling linear, llama3, yarn, factors or none, got 'longrope'",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "type": "yarn"}}, "rope scaling llama3 misses"),
        (
            {"rope_scaling": ..., "rope_parameters": {"full_attention": {"rope_theta": 77.0}}},
            r"positions by kind of layer \(full_attention\) are not modelled yet",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling yarn misses factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 2.0}}, "rope scaling yarn: mscale is not modelled"),
        ({"partial_rotary_factor": 0.5}, "llama: partial_rotary_factor 0.5 is not modelled yet"),
        ({"model_type": "gpt2"}, "model_type: expected one of llama, mistral, qwen2, qwen3, gemma, got 'gpt2'"),
        ({"model_type": ...}, "model_type: expected one of .*, got ''"),
        ({"hidden_act": "gelu"}, "llama: hidden_act 'gelu' is not modelled yet"),
        ({"attention_bias": True}, "llama: attention_bias"),
        ({"mlp_bias": True}, "llama: mlp_bias"),
        ({"vocab_size": ...}, "config.json has no 'vocab_size'"),
        ({"num_key_value_heads": 5}, "num_kv_heads: expected a divisor of 32 heads, got 5"),
        ({"head_dim": 15}, "head_dim: expected an even number, for rotation takes pairs, got 15"),
        ({"vocab_size": "32000"}, "expected an integer 'vocab_size' in config.json, got '32000'"),
        ({"num_attention_heads": 6.5}, "expected an integer 'num_attention_heads' in config.json, got 6.5"),
        ({"rms_norm_eps": -1}, "expected a finite 'rms_norm_eps' above 0 in config.json, got -1"),
        ({"rope_theta": "x"}, "expected a finite 'rope_theta' above 0 in config.json, got 'x'"),
        ({"num_attention_heads": 0}, "num_heads: expected at least 1, got 0"),
        ({"tie_word_embeddings": "true"}, "expected true or false as 'tie_word_embeddings' in config.json, got 'true'"),
        ({"rope_scaling": ["x"]}, "expected an object as 'rope_scaling' in config.json, got"),
        ({"num_experts": "8"}, "expected a number as 'num_experts' in config.json, got '8'"),
        ({"num_hidden_layers": 10**9}, "expected at most 10000 as 'num_hidden_layers' in config.json, got 1000000000"),
        ({"torch_dtype": "torch.float16"}, "dtype: expected one of .* in config.json, got 'torch.float16'"),
        ({"torch_dtype": "int4"}, "dtype: expected one of bfloat16, float16, .* in config.json, got 'int4'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Architecture.from_config(llama_config(**changes))


def test_windows_are_those_of_transformers() -> None:
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 512}, 512),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": 131072}, None),
        ({"model_type": "qwen2", "sliding_window": 512}, None),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0}, 512),
        ({"model_type": "qwen2", "sliding_window": 17, "use_sliding_window": True, "max_window_layers": 32}, None),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 17,
                "use_sliding_window": True,
                "max_window_layers": 32,
                "layer_types": ["full_attention"] * 32,
            },
            None,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 17,
                "use_sliding_window": True,
                "max_window_layers": 32,
                "layer_types": ["sliding_attention"] * 32,
            },
            17,
        ),
        ({"layer_types": ["full_attention"] * 32, "rope_interleaved": False, "attention_dropout": 0.1}, None),
    ]
    for changes, window in cases:
        assert Architecture.from_config(llama_config(**changes)).window == window, changes


def test_an_unknown_model_lists_the_presets() -> None:
    assert get_architecture("Llama-3-70B") is LLAMA_70B
    with pytest.raises(ValueError, match="model: expected one of llama-3.1-8b, .*, or a config.json, got 'llama-9'"):
        get_architecture("llama-9")

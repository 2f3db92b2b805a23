"""mla_decode: splits and their edges, layouts, garbage behind the table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_kernels import CPU

from rooflab.kernels.mla_decode import library, naive, split_kv
from rooflab.reference.mla_decode import SPEC, reference
from rooflab.reference.spec import SCHEMES, Case

EVERY = {"naive": naive.naive, "library": library.library, "split_kv": split_kv.split_kv}
ALL = pytest.mark.parametrize("name", EVERY)
OURS = pytest.mark.parametrize("name", ["naive", "split_kv"])
SMALL = split_kv.Config(16, 16, 4, 1)


def given(**changes: Any) -> dict[str, Any]:
    case = Case.parse("B=3,context=40,H=5,latent=32,rotary=16,block_size=4,ragged=true")
    return SPEC.make_inputs(case, SCHEMES["fp16"], CPU, 0) | changes


def run(name: str, inputs: dict[str, Any]) -> Any:
    return EVERY[name](**inputs, **({"config": SMALL} if name == "split_kv" else {}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64])
def test_any_number_of_splits_gives_the_same(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """40 keys of which some sequences have none: most of 64 splits are empty."""
    monkeypatch.setattr(split_kv, "split_count", lambda ctas, keys, sms: splits)
    inputs = given(return_lse=True)
    out, lse = run("split_kv", inputs)
    wanted = reference(**inputs)
    torch.testing.assert_close(out.double(), wanted[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-3, atol=1e-3)
    assert not out[1].any() and (lse[1] == -math.inf).all(), "the middle sequence is empty"


def test_splits_fill_the_sms_and_are_no_shorter_than_pays() -> None:
    assert split_kv.split_count(2, 4096, 132) == 16 and split_kv.split_count(2, 65536, 132) == 64
    assert split_kv.split_count(128, 4096, 132) == 1 and split_kv.split_count(1, 100, 132) == 1
    assert split_kv.split_count(0, 0, 132) == 1 and split_kv.split_count(64, 4096, 132) == 2
    assert split_kv.split_count(128, 131072, 132) == 1
    for ctas in (80, 140):
        splits = split_kv.split_count(ctas, 4096, 132)
        assert -(-ctas * splits // 132) / splits < 0.85 * -(-ctas // 132), "SMs without work in the last wave"


@ALL
def test_garbage_behind_the_tables_pages_and_in_unused_slots_is_not_read(name: str) -> None:
    inputs = given()
    plain = run(name, inputs)
    used = -(-inputs["seq_lens"] // 4)
    for b, count in enumerate(used.tolist()):
        inputs["block_table"][b, count:] = 2**31 - 1 if name != "library" else -(2**31)
    assert torch.equal(run(name, inputs), plain) and plain.isfinite().all()


@OURS
def test_strided_outputs_are_written(name: str) -> None:
    inputs = given(return_lse=True)
    wanted = run(name, inputs)
    out, lse = torch.zeros(3, 5, 40).half()[..., :32], torch.zeros(5, 3).mT
    found = run(name, inputs | {"out": (out, lse)})
    assert found[0] is out and found[1] is lse
    torch.testing.assert_close((out, lse), wanted)


LATENT, ROTARY = "latent_dim: expected 16 to 512, got", "q: expected 1 to 64 rotary dimensions behind the latent, got"


@pytest.mark.parametrize(
    ("dims", "latent", "message"), [(8 + 64, 8, LATENT), (512 + 65, 512, ROTARY), (520, 513, LATENT), (32, 32, ROTARY)]
)
def test_split_kv_names_the_sizes_that_it_takes(dims: int, latent: int, message: str) -> None:
    q, cache = torch.zeros(1, 1, dims).half(), torch.zeros(1, 1, dims).half()
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        split_kv.split_kv(q, cache, table, lens, latent, 1.0)

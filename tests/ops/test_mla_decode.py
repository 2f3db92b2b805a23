"""mla_decode: splits and their edges, and garbage after the end of the page table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_kernels import CPU, is_right

from rooflab.kernels.mla_decode import library, naive, split_kv
from rooflab.reference.mla_decode import SPEC, reference
from rooflab.reference.spec import SCHEMES, Case

EVERY = {"naive": naive.naive, "library": library.library, "split_kv": split_kv.split_kv}
SMALL = split_kv.Config(16, 16, 4, 1)


def given(**changes: Any) -> dict[str, Any]:
    case = Case.parse("B=3,context=40,H=5,latent=32,rotary=16,block_size=4,ragged=true")
    return SPEC.make_inputs(case, SCHEMES["fp16"], CPU, 0) | changes


def run(name: str, inputs: dict[str, Any]) -> Any:
    return EVERY[name](**inputs, **({"config": SMALL} if name == "split_kv" else {}))


@pytest.mark.parametrize("splits", [1, *(pytest.param(more, marks=pytest.mark.more) for more in (2, 3, 7, 64))])
def test_any_number_of_splits_gives_the_same(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """40 keys of which some sequences have none: most of 64 splits are empty."""
    monkeypatch.setattr(split_kv, "split_count", lambda ctas, keys, sms: splits)
    inputs = given(return_lse=True)
    out, lse = run("split_kv", inputs)
    wanted = reference(**inputs)
    torch.testing.assert_close(out.double(), wanted[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-3, atol=1e-3)
    assert not out[1].any() and (lse[1] == -math.inf).all(), "the middle sequence is empty"


@pytest.mark.parametrize("name", EVERY)
def test_garbage_behind_the_tables_pages_and_in_unused_slots_is_not_read(name: str) -> None:
    inputs = given()
    plain = run(name, inputs)
    used = -(-inputs["seq_lens"] // 4)
    for b, count in enumerate(used.tolist()):
        inputs["block_table"][b, count:] = 2**31 - 1 if name != "library" else -(2**31)
    assert torch.equal(run(name, inputs), plain) and plain.isfinite().all()


def test_a_planted_key_decides_the_result() -> None:
    case, scheme = Case.parse("B=1,context=40,H=5,latent=32,rotary=16,block_size=4,ragged=false"), SCHEMES["fp16"]
    planted = {label: inputs for label, inputs in SPEC.planted(case, scheme, CPU, 0) if label.startswith("key ")}
    for label, inputs in planted.items():
        page, slot = divmod(int(label.removeprefix("key ")), 4)
        silent = inputs["kv_cache"].clone()
        silent[inputs["block_table"][0, page], slot] = 0.0
        assert not is_right(SPEC, SPEC.oracle({**inputs, "kv_cache": silent}), inputs, scheme), label
    assert len(planted) > 5

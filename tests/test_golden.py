"""Golden outputs: kept whole, and the emulator is held to them bit by bit and by tolerance.

Here they come from Triton's interpreter, for want of a GPU: what is tested is the keeping and the comparing.
"""

import json

import numpy as np
import pytest
import torch

from rooflab.bench.emulate import golden
from rooflab.bench.predict.cases import Target
from rooflab.kernels import registry
from rooflab.reference.spec import get_scheme

CHOSEN = [
    Target(op, "fused", registry.get_op(op).get_cases("smoke")[0], get_scheme("fp32"))
    for op in ("silu_and_mul", "rope")
]


@pytest.fixture
def folder(tmp_path):
    golden.write(tmp_path, torch.device("cpu"), CHOSEN)
    return tmp_path


def test_what_was_kept_is_reproduced(folder):
    found = golden.compare(folder)
    assert [item.passed for item in found] == [True, True]
    assert all(0 < item.equal <= item.elements for item in found)


def test_an_output_that_differs_is_named(folder):
    file = folder / "silu_and_mul-fused-fp32.npz"
    with np.load(file) as kept:
        raw = kept["output_0"].copy()
    raw.reshape(-1)[3] ^= 1 << 30
    np.savez_compressed(file, output_0=raw)
    found = {item.target.split()[0]: item for item in golden.compare(folder)}
    assert not found["silu_and_mul/fused"].passed and "1 of" in found["silu_and_mul/fused"].reason
    assert found["rope/fused"].passed


def test_what_has_a_file_is_not_run_again(folder, monkeypatch):
    monkeypatch.setattr(golden, "outputs_of", lambda *arguments: pytest.fail("it was run again"))
    assert golden.write(folder, torch.device("cpu"), CHOSEN) == ["silu_and_mul-fused-fp32", "rope-fused-fp32"]


def test_what_is_kept_keeps_the_commit_that_it_was_made_from(folder):
    index = folder / "golden.json"
    kept = json.loads(index.read_text())
    kept["kernels"]["rope-fused-fp32"]["commit"] = "an older one"
    index.write_text(json.dumps(kept))
    (folder / "silu_and_mul-fused-fp32.npz").unlink()
    golden.write(folder, torch.device("cpu"), CHOSEN)
    after = json.loads(index.read_text())["kernels"]
    assert after["rope-fused-fp32"]["commit"] == "an older one" != after["silu_and_mul-fused-fp32"]["commit"]


def test_at_least_twenty_outputs_are_kept_on_a_card():
    names = {(target.op, target.kernel, target.scheme.name) for target in golden.targets()}
    assert len(names) >= 20 and {scheme for _, _, scheme in names} >= {"fp32", "fp16", "bf16"}


def test_a_folder_without_an_index_is_refused(tmp_path):
    with pytest.raises(ValueError, match="golden: expected a folder with golden.json"):
        golden.compare(tmp_path)
    (tmp_path / "golden.json").write_text(json.dumps({"kernels": {}}))
    assert golden.compare(tmp_path) == []

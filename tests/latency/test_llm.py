"""The memory of a model, and its least TTFT and ITL."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from rooflab.roofline import steps
from rooflab.roofline.architecture import PRESETS
from rooflab.roofline.device import get_device
from rooflab.roofline.llm import estimate, weight_bytes

LLAMA_8B, LLAMA_70B = PRESETS["llama-3.1-8b"], PRESETS["llama-3.1-70b"]
H100 = get_device("h100")


def test_a_70b_needs_141_gb_and_two_h100() -> None:
    assert weight_bytes(LLAMA_70B) == pytest.approx(141.1e9, rel=1e-3)
    assert estimate(LLAMA_70B, H100, batch=1, context=1024).gpus_for_weights == 2
    assert not estimate(LLAMA_70B, H100, 1, 1024, tensor_parallel=1).fits


def test_attention_counts_the_pairs_that_it_sees_in_a_window_too() -> None:
    each_pair = 4 * 128 * 32
    for window, prefill, decode in ((None, 1000 * 1001 / 2, 1000), (100, 100 * 101 / 2 + 900 * 100, 100)):
        arch = replace(LLAMA_8B, window=window)
        for kind, op, pairs in (("prefill", "flash_attention", prefill), ("decode", "paged_attention", decode)):
            (found,) = (one for one in steps.step_ops(arch, kind, 1, 1000) if one.op == op)  # type: ignore[arg-type]
            assert (found.calls, found.cost.tensor_flops) == (32, {"bf16": each_pair * pairs})


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "qwen3-0.6b"])
def test_a_gpu_of_two_does_half(preset: str) -> None:
    whole, part = (
        sum(
            op.calls * op.cost.flops
            for op in steps.step_ops(PRESETS[preset], "prefill", 1, 256, gpus=gpus)
            if op.op != "rmsnorm"
        )
        for gpus in (1, 2)
    )
    assert part == pytest.approx(whole / 2, rel=2e-3)


def test_all_reduce_goes_over_the_link_that_joins_the_cards() -> None:
    """Switches that add, those that do not, bridges of two cards, and PCIe."""
    assert steps.all_reduce_s(450e9, 1, steps.link(H100, 1)) == 0.0
    assert steps.all_reduce_s(450e9, 8, steps.link(H100, 8)) == 1.0
    assert steps.all_reduce_s(300e9, 8, steps.link(get_device("a100"), 8)) == 1.75
    assert steps.link(get_device("h100-pcie"), 2) == ("NVLink", 300e9, False)
    assert steps.link(get_device("h100-pcie"), 4) == ("PCIe", 64e9, False)
    result = estimate(LLAMA_70B, H100, batch=32, context=1024, tensor_parallel=2)
    assert (result.link, result.link_bytes_per_s) == ("NVLink", 450e9)
    assert result.decode.all_reduce_ms == pytest.approx(2 * 80 * 32 * 8192 * 2 / 450e9 * 1e3)


@pytest.mark.parametrize(("context", "gpus"), [(8192, 1), (131_072, 1), (1, 8)])
def test_as_many_sequences_fit_as_are_said_to_whatever_the_batch(context: int, gpus: int) -> None:
    told = lambda batch: estimate(LLAMA_8B, H100, batch, context, tensor_parallel=gpus)
    most = told(1).max_sequences
    assert context == 1 or most == (72e9 - 16.06e9 - 0.84e9) // (context * 131_072)
    assert told(most).fits and not told(most + 1).fits
    huge = told(1_000_000)
    assert (huge.max_sequences, huge.gpus_for_weights, huge.fits) == (most, 1, False)


def test_groups_of_gpus_divide_the_heads_and_what_no_group_holds_is_said() -> None:
    assert steps.gpu_counts(LLAMA_70B) == [1, 2, 4, 8]
    assert steps.gpu_counts(PRESETS["smollm2-135m"]) == [1, 3]
    result = estimate(LLAMA_70B, get_device("l4"), batch=64, context=8192)
    assert (result.gpus_needed, result.tensor_parallel, result.fits) == (None, 8, False)
    assert ("GPUs needed for this batch", "more than one node has") in result.rows()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", 0),
        ("context", 0),
        ("context", 131_073),
        ("prompt", 131_073),
        ("weight_dtype", "int3"),
        ("kv_dtype", "int3"),
        ("tensor_parallel", 3),
        ("tensor_parallel", 0),
        ("memory_fraction", 1.5),
    ],
)
def test_bad_questions_are_refused(name: str, value: Any) -> None:
    asked: dict[str, Any] = {"architecture": LLAMA_8B, "device": H100, "batch": 1, "context": 1024}
    with pytest.raises(ValueError, match=f"{name}: expected .* got {value!r}"):
        estimate(**(asked | {name: value}))


def test_an_estimate_is_json_and_a_table() -> None:
    result = estimate(LLAMA_70B, H100, batch=8, context=8192)
    again = json.loads(json.dumps(asdict(result)))
    assert again["least_itl_ms"] == again["decode"]["least_ms"] == result.least_itl_ms
    rows = dict(result.rows())
    assert rows["weights"].startswith("141.1 GB, 35.28 GB on each of 4")
    assert rows["KV cache, 8 x 8192 tokens"] == "21.47 GB"
    assert "NVLink, 450 GB/s one way" in rows["all-reduce"]
    assert "mostly memory" in rows["least ITL, batch 8"]

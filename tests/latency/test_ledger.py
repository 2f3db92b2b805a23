"""The step ledger, the effect of another kernel on it, and its use from a program."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import tiny_llm, write_config, write_model

from rooflab.bench.core.record_files import read
from rooflab.bench.core.select import Selection
from rooflab.bench.latency.captured_suite import capturing
from rooflab.bench.latency.ledger import calls_of, from_kernels, measured, stepping
from rooflab.bench.latency.step_model import KernelTimes
from rooflab.bench.latency.whatif import scale, swap
from rooflab.bench.report.content import gather
from rooflab.bench.report.page import render
from rooflab.bench.report.sources import load
from rooflab.engine.llm import LLM
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Ceilings, Cost
from rooflab.roofline.step_times import step_time
from rooflab.roofline.steps import step_ops

CEILINGS = Ceilings("made up", "measured", 1e10, {"fp32": 1e11}, 1e10)
OPTIONS = {"max_num_seqs": 3, "max_num_batched_tokens": 128, "prefix_caching": False, "num_kv_blocks": 64}


@pytest.mark.parametrize(("kind", "batch", "context"), [("decode", 3, 20), ("prefill", 1, 40)])
def test_a_measured_ledger_has_every_call_with_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, batch: int, context: int
) -> None:
    llm, ticks = tiny_llm(tmp_path, enforce_eager=True, **OPTIONS), itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks))
    monkeypatch.setattr("rooflab.bench.latency.ledger.time", clock)
    monkeypatch.setattr("rooflab.bench.latency.ledger.ceilings_for", lambda device: CEILINGS)
    found, layers = measured(llm, kind, batch, context, steps=3), llm.arch.num_layers
    for site, calls in (("qkv_proj", layers), ("lm_head", 1), ("fused_add_rmsnorm", 2 * layers)):
        assert sum(row.calls for row in found.rows if row.site == site) == calls
    assert all(row.ms > 0 and row.cost and row.cost.bytes > 0 and row.bound_ms for row in found.rows)
    assert found.ops_ms > 0 < found.host_ms and (found.itl_ms is None) == (kind == "prefill") and not llm.has_work
    assert found.residual == pytest.approx(0, abs=1e-9), "every step takes the same number of ticks"


@pytest.mark.needs("C++ compiler")
def test_a_replayed_step_has_the_time_of_each_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, asked = Ceilings("made up", "measured", 1.0, {"fp32": 1.0}, 1.0), list[Ceilings]()
    monkeypatch.setattr("rooflab.bench.latency.ledger.ceilings_for", lambda device: slow)
    monkeypatch.setattr(
        "rooflab.bench.latency.ledger.raise_ceilings", lambda ceilings, device: asked.append(ceilings) or CEILINGS
    )
    native = dict.fromkeys(("embedding", "rmsnorm", "fused_add_rmsnorm", "gemm", "silu_and_mul"), "native")
    llm = tiny_llm(tmp_path, **OPTIONS, swap=native)
    for batch in (1, 3):
        found = measured(llm, "decode", batch, 20, steps=4)
        assert sum(row.calls for row in found.rows) == 1 + 9 * llm.arch.num_layers + 3
        assert all(row.ms > 0 for row in found.rows) and found.host_ms > 0
        assert all(row.bound_ms < 1e3 for row in found.rows), "a bound above a time is measured again"
        assert (batch, torch.get_num_threads()) in llm.runner.graphs.recordings
    assert llm.runner.graphs.note_time is None and asked == [slow, slow]


@pytest.mark.parametrize(("kind", "batch", "context"), [("decode", 3, 20), ("decode", 1, 33), ("prefill", 1, 40)])
def test_the_engines_calls_are_the_ops_of_the_step(tmp_path: Path, kind: Any, batch: int, context: int) -> None:
    """The list that bounds, ledgers and the clock sum over is what the engine calls, with the specs' own costs.

    The engine differs in three ways: one kernel does RoPE and the write of keys and values; in a prompt's last layer,
    behind attention, its last token alone is left; and small tensors of lengths and options are read besides.
    """
    llm = tiny_llm(tmp_path, **OPTIONS)
    with stepping(llm, kind, batch, context - 1 if kind == "decode" else context, 4) as step:
        step()
        calls = [
            (call.op, call.site, call.cost)
            for call in calls_of(llm, step, kind, batch, context)
            if call.cost is not None
        ]
    names = {"flash_attention": "flash_attention_varlen", "rope": "rope_and_cache"}
    late = {"o_proj": 1, "norms": 2, "gate_up_proj": 1, "silu_and_mul": 1, "down_proj": 1}  # calls of the last layer
    shape = llm.arch, kind, batch, context, "fp32", "fp32"
    listed = [one for one in step_ops(*shape) if one.op != "kv_cache_write"]
    of_one_token = {one.site: one.cost for one in step_ops(llm.arch, "decode", 1, context, "fp32", "fp32")}
    assert len(calls) == sum(one.calls for one in listed)
    for one in listed:
        op = names.get(one.op, one.op)
        costs = [cost for name, site, cost in calls if name == op and (op != "gemm" or site == one.site)]
        whole = one.calls - (late.get(one.site, 0) if kind == "prefill" else 0)
        expected = [one.cost] * whole + [of_one_token.get(one.site, one.cost)] * (one.calls - whole)
        for cost, wanted in zip(costs, expected, strict=True):
            assert _work(cost) == _work(wanted), one.site
            if op == "embedding":
                assert cost.bytes <= wanted.bytes, "a token that comes twice is read once"
            elif op != "rope_and_cache":
                assert 0 <= cost.bytes - wanted.bytes <= 32 * batch, one.site


def _work(cost: Cost) -> tuple[dict[str, float], float, float]:
    return dict(cost.tensor_flops), cost.vector_flops, cost.sfu_ops


@pytest.mark.parametrize(("budget", "batch", "context"), [(16, 3, 100), (16, 8, 30), (64, 2, 9)])
def test_sequences_that_decode_have_one_length(tmp_path: Path, budget: int, batch: int, context: int) -> None:
    """Though their prompts are computed in several steps, in which the first of them decode already."""
    options = OPTIONS | {"max_num_seqs": 8, "max_num_batched_tokens": budget}
    llm = LLM(write_model(tmp_path, eos_token_id=[*range(1024)]), device="cpu", **options)  # any token is an end
    with stepping(llm, "decode", batch, context, 3) as step:
        for more in range(3):
            step()
            assert [len(sequence) for sequence in llm.scheduler.running] == [context + more + 1] * batch
    for kind, most, length in (("decode", 8, 1), ("prefill", 2, 8), ("prefill", 1, 257), ("decode", 9, 8)):
        with pytest.raises(ValueError, match="expected"):
            measured(llm, kind, most, length)  # type: ignore[arg-type]
    assert not llm.has_work


def test_a_published_ledger_sums_to_the_published_step_and_a_share_of_it_changes() -> None:
    model = KernelTimes(get_architecture("llama-3.1-8b"), get_device("h100-sxm"))
    found, step = from_kernels(model, "decode", 16, 2048), step_time(model.arch, model.device, "decode", 16, 2048)
    gemm, attention = scale(found, {"gemm": 0.8, "paged_attention": 0.5, "flash_attention": 0.5})
    assert step is not None and found.step_ms == pytest.approx(step.ms)
    assert gemm.predicted_ms == pytest.approx(step.ms - 0.2 * found.ms_of("gemm"))
    assert attention.predicted_ms == pytest.approx(step.ms - 0.5 * found.ms_of("paged_attention"))


@pytest.mark.more
def test_a_swap_is_predicted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooflab.bench.latency.whatif.BUDGET_S", 0.01)
    monkeypatch.setattr("rooflab.bench.latency.ledger.ceilings_for", lambda device: CEILINGS)
    llm = tiny_llm(tmp_path, **OPTIONS)
    for op, name in (("gemm", "library"), ("fused_add_rmsnorm", "naive")):
        other = tiny_llm(tmp_path, **OPTIONS, swap={op: name})
        found = swap(llm, other, op, get_kernel(op, name), "decode", 2, 20)
        assert found is not None and found.measured_ms and math.isfinite(found.predicted_ms)
        assert found.after == name and 0 < found.share < 1 and found.kernel > 0
    asked = get_kernel("flash_attention_varlen", "library")
    assert swap(llm, other, "flash_attention_varlen", asked, "decode", 2, 20) is None
    found = swap(llm, other, "gemm", get_kernel("gemm", "library"), "decode", 2, 20)
    assert found is not None and "another kernel for fused_add_rmsnorm too" in found.noise


@pytest.mark.parametrize("grad", [torch.inference_mode, torch.no_grad])
def test_torchs_operators_are_captured_as_our_cases(grad: Any) -> None:
    class OwnRMSNorm(torch.nn.Module):
        variance_epsilon = 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    class SiluAndMul(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(x[..., :64]) * x[..., 64:]

    x, linear, biased = torch.randn(2, 7, 64), torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(64, 32)
    q, norm, gated, mask = torch.randn(2, 4, 9, 16), OwnRMSNorm(), SiluAndMul(), torch.ones(9, 9).tril().bool()
    attend = torch.nn.functional.scaled_dot_product_attention

    class Program(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            linear(x), biased(x), norm(x), torch.nn.functional.embedding(torch.arange(5), linear.weight)
            gated(torch.cat((x, x), -1))
            attend(q, q, q, is_causal=True), attend(q[..., :8], q[..., :8], q[..., :8], attn_mask=mask)
            attend(q[0], q[0], q[0]), torch.zeros(())  # no batch: none of our cases; no argument on a GPU
            x.cos(), torch.nn.functional.silu(q)

    program = Program()
    with grad(), capturing() as found:
        torch.mm(q[0, 0], q[0, 0].T)  # no part of the model
        program(x)
    cases = {(key.op, key.case, key.scheme): count for key, count in found.model.calls.items()}
    assert cases == {
        ("gemm", "M=14,N=96,K=64,layout=NT,bias=false", "fp32"): 1,
        ("gemm", "M=14,N=32,K=64,layout=NT,bias=true", "fp32"): 1,
        ("rmsnorm", "T=14,H=64,eps=1e-05", "fp32"): 1,
        ("embedding", "T=5,V=96,H=64", "fp32"): 1,
        ("silu_and_mul", "T=14,I=64", "fp32"): 1,
        ("flash_attention", "B=2,T=9,S=9,H=4,H_kv=4,D=16,causal=true", "fp32"): 1,
        ("flash_attention", "B=2,T=9,S=9,H=4,H_kv=4,D=8,causal=true", "fp32"): 1,
    }
    assert 0 < found.explained < 1 and list(found.outside.calls.values()) == [1]


def test_a_program_becomes_a_suite_that_the_bench_takes(rooflab: Any, tmp_path: Path) -> None:
    program, suite = tmp_path / "app.py", tmp_path / "mine.json"
    program.write_text(
        "import sys, torch\nassert sys.argv[1:] == ['--rows', '6']\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 96, bias=False))\n"
        "with torch.inference_mode():\n    [model(torch.randn(rows, 64)) for rows in (6, 6, 3)]\n"
    )
    status, out, err = rooflab("capture", "--suite", suite, "--", "python", program, "--rows", "6")
    assert status == 0, err
    found = json.loads(suite.read_text())
    assert 0 < found["explained"] <= 1 and f"{found['explained']:.0%} of" in out
    calls = {row["case"]: row["calls"] for row in found["ops"]["gemm"]}
    assert calls == {
        "M=6,N=32,K=64,layout=NT,bias=true": 2,
        "M=6,N=96,K=32,layout=NT,bias=false": 2,
        "M=3,N=32,K=64,layout=NT,bias=true": 1,
        "M=3,N=96,K=32,layout=NT,bias=false": 1,
    }
    chosen = Selection.of("gemm", ["library"], [str(suite)], None, ["fp32"], "cpu")
    assert {case.id for case in chosen.cases_of(get_op("gemm"))} == set(calls)


def test_wrong_words_are_named_and_leave_the_suite_as_it_was(rooflab: Any, tmp_path: Path) -> None:
    fails, suite = tmp_path / "fails", tmp_path / "mine.json"
    fails.write_text("{}['x']\n")
    suite.write_text("kept")
    for words, said in (
        (("capture", "--suite", suite, "--", "./none"), "program: expected python app.py"),
        (("capture", "--suite", suite, "--", "python", "/bin/ls"), "program: expected a program in Python"),
        (("capture", "--suite", suite, "--", "python", fails), "program: expected it to end well, got KeyError: 'x'"),
        (("capture", "--suite", "x.txt", "--", "python", fails), "suite: expected a file called .json"),
        (("whatif", "--kernel", "gemm=2x", "--kernel", "gemm=3x"), "each op once, got 'gemm=3x'"),
        (("whatif", "llama-3.1-8b", "--gpu", "h100", "--kernel", "conv=2x"), "--kernel: the steps use embedding, "),
    ):
        status, _, err = rooflab(*words)
        assert status == 2 and said in err and suite.read_text() == "kept", err


def test_the_ledgers_command(rooflab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("ceilings_for", lambda _: CEILINGS),
        ("raise_ceilings", lambda *_: CEILINGS),
        ("why_noisy", lambda *_: ""),
        ("MAX_OPS_RATIO", math.inf),
    ):
        monkeypatch.setattr(f"rooflab.bench.latency.ledger.{name}", value)
    folder = tmp_path / "times"  # the first kernel is the fastest in every engine of this test
    monkeypatch.setattr("rooflab.engine.choose.choose_kernels.folder", lambda: folder)
    monkeypatch.setattr(
        "rooflab.engine.choose.choose_kernels.time_kernels",
        lambda op, rows, kernels, *_: {kernel.name: float(number) for number, kernel in enumerate(kernels, 1)},
    )
    write_config(tmp_path / "tiny")
    asked = ("ledger", tmp_path / "tiny", "--dummy", "--device", "cpu", "--context", "20")
    for kernel in ("library", "packed"):
        status, out, _ = rooflab(*asked, "--swap", f"gemm={kernel}", "--out", tmp_path / "out")
        assert status == 0 and "host and gaps" in out and "qkv_proj" in out
    record = read(tmp_path / "out")[0]
    assert (record.case_id, record.basis) == ("ledger", "measured") and record.metrics["step_ms"] > 0
    content = gather(*load([tmp_path / "out"]), "title")
    (group,) = content.ledgers
    assert not content.engine and {bar["kernels"] for bar in group["bars"]} == {"gemm=library", "gemm=packed"}
    parts = [part for bar in group["bars"] for part in bar["segments"]]
    largest = [max(part["ms"] for part in parts if part["name"] == name) for name, _ in group["names"]]
    assert largest == sorted(largest, reverse=True)
    widths = [sum(part["percent"] for part in bar["segments"]) for bar in group["bars"]]
    assert max(widths) == pytest.approx(100) and min(widths) > 1 and "Where a step" in render(content)
    chosen = {choice.op: choice.kernel.name for choice in tiny_llm(tmp_path / "tiny").ops.choices}["sample"]
    status, _, err = rooflab("whatif", *asked[1:], "--swap", f"sample={chosen}")
    assert status == 2 and f"swap: the engine runs sample={chosen} already" in err
    monkeypatch.setattr("rooflab.bench.latency.ledger.MAX_OPS_RATIO", 0.0)
    for words in (asked, ("whatif", *asked[1:], "--kernel", "gemm=0.5x")):
        status, out, _ = rooflab(*words, "--out", tmp_path / "noisy")
        assert status == 13 and "NOISY" in out and " times as long as the step" in out and "share" not in out
    noisy = read(tmp_path / "noisy")
    assert [one.status for one in noisy] == ["NOISY"] * 3 and not any("share" in one.metrics for one in noisy)
    assert not gather(*load([tmp_path / "noisy"]), "title").ledgers, "a bar would be a comparison"


def test_a_published_ledger_and_what_another_kernel_would_change_by_command(rooflab: Any, tmp_path: Path) -> None:
    scaled = ("whatif", "llama-3.1-8b", "--gpu", "h100", "--kernel", "gemm=0.5x", "--out", tmp_path)
    rows = json.loads(rooflab(*scaled, "--json")[1])["rows"]
    kept = read(tmp_path)
    assert [(one.case["figure"], one.case["after"], one.basis) for one in kept] == [
        ("TTFT", "0.5x", "predicted"),
        ("ITL", "0.5x", "predicted"),
    ]
    assert [one.metrics["predicted_ms"] for one in kept] == [row["predicted_ms"] for row in rows]
    words = ("ledger", "llama-3.1-8b", "--gpu", "h100", "--prefill", "--context", "512")
    status, out, _ = rooflab(*words, "--json")
    found = json.loads(out)
    assert status == 0 and found["step_ms"] == pytest.approx(sum(row["ms"] for row in found["rows"]))
    assert "prefill of 1 x 512 tokens" in rooflab(*words, "--batch", "9")[1], "a prompt is computed alone"

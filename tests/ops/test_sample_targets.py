"""The reads of sample's compiled code, its adapter to FlashInfer, and its target."""

import dataclasses
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from targets import sampling
from test_sample import FP32, rows_of

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.record import Record
from rooflab.bench.emulate.calls import call
from rooflab.bench.suite.entries import Context
from rooflab.kernels.registry import get_kernel
from rooflab.kernels.sample.cluster import TUNING as CLUSTER
from rooflab.reference.sample import SPEC
from rooflab.reference.spec import Case, get_scheme


@pytest.mark.more
@pytest.mark.timeout(300)  # ten seconds until the emulator's processes are there
def test_compiled_code_of_a_cluster_reads_a_logit_once_and_races_nowhere():
    """Counted in the emulator over eight CTAs, which search two cuts; beside the row each thread reads its settings."""
    case = Case(B=1, V=16384, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
    config = CLUSTER.heuristic(case)
    answer = call(KernelCase("sample", "cluster", case, FP32)).answer
    assert config.cluster == 8 and answer["status"] == "OK" and not answer["races"], answer["reason"]
    (launch,) = answer["launches"]
    assert launch["instructions"]["ld.global.L1::no_allocate.v4.u32"] * 4 == 16384
    assert launch["bytes"]["global_read"] - 4 * 16384 <= 32 * config.cluster * config.threads
    assert launch["bytes"]["hbm_read"] - 4 * 16384 <= 7 * 32


def _top_p_of_flashinfer(probs, top_p):
    """Keeps what is as likely as the last token that is kept, as FlashInfer does, and draws from torch's stream."""
    above = (torch.where(probs[:, None] > probs[:, :, None], probs[:, None], 0.0)).sum(-1)
    return torch.multinomial(torch.where(above < top_p[:, None], probs, 0.0), 1)[:, 0].int()


def _top_k_top_p_of_flashinfer(logits, top_k, top_p, filter_apply_order):
    assert filter_apply_order == "top_k_first" and logits.dtype == torch.float32
    ks = [top_k] * len(logits) if isinstance(top_k, int) else top_k.tolist()
    least = torch.stack([row.topk(k).values[-1] for row, k in zip(logits, ks, strict=True)])
    return _top_p_of_flashinfer(logits.masked_fill(logits < least[:, None], -math.inf).softmax(-1), top_p)


@pytest.fixture
def flashinfer(monkeypatch):
    """The peer, as a kernel that a CPU can check; the package is a fake that keeps ties."""
    fake = SimpleNamespace(
        top_p_sampling_from_probs=_top_p_of_flashinfer, top_k_top_p_sampling_from_logits=_top_k_top_p_of_flashinfer
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    kernel = get_kernel("sample", "flashinfer")
    return dataclasses.replace(kernel, backend="torch", devices=("cpu",), requires=(), min_sm=None)


@pytest.mark.parametrize("cut", [{}, {"top_k": 20}, {"top_k": 200, "top_p": 0.7}, {"top_p": 0.4}])
def test_flashinfer_passes_the_whole_check(flashinfer, cut):
    case = Case(B=5, V=96, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0).but(**cut)
    found = check_kernel(flashinfer, SPEC, case, get_scheme("bf16"))
    assert found.status == "OK", found.describe()


def test_flashinfer_has_one_k_or_one_of_each_row_and_refuses_what_it_lacks(flashinfer):
    inputs = rows_of(torch.randn(40), (1.0, 5, 0.9, 0.0), 3)
    plan = lambda **changes: flashinfer.plan(SPEC.arguments(inputs | changes))
    assert plan() == 5 and plan(top_k=torch.tensor([0, 40, 99])) == 40
    several = inputs | {"top_k": torch.tensor([0, 3, 99], dtype=torch.int32)}
    assert plan(**several).tolist() == [40, 3, 40]
    unlikely, oracle = torch.full((3,), int(inputs["logits"][0].argmin())), SPEC.oracle(several)
    for tokens, right in ((flashinfer(**several), True), (unlikely, False)):
        assert SPEC.compare_own_stream((tokens,), oracle, several, FP32)[0].passed is right
    for name, values in (("temperature", [1.0, 0.0, 1.0]), ("min_p", [0.0, 0.1, 0.0])):
        with pytest.raises(ValueError, match=f"{name}: expected .* in all rows"):
            flashinfer.fn(**inputs | {name: torch.tensor(values)})


@pytest.mark.parametrize(
    ("own_ms", "library_ms", "peer_ms", "bar"),
    [
        (0.19, 0.6, 0.2, "MET"),
        (0.19, 0.6, 0.18, "MISSED"),
        (0.19, 0.56, None, "MISSED"),
        (0.2, 0.9, None, "MISSED"),
        (None, 0.6, None, "UNMEASURED"),
        (0.19, None, None, "UNMEASURED"),
    ],
)
def test_the_bar_counts_reads_of_a_copy_and_compares_with_torch_and_peers(
    monkeypatch, tmp_path, own_ms, library_ms, peer_ms, bar
):
    """A copy of 4 TB/s reads the logits of 512 rows three times in 0.197 ms."""
    entry, ceilings = sampling.TARGETS[0], {"kind": "measured", "access_bytes_per_s": {"copy": 4e12}}
    case = Case.parse(entry.arguments["cases"][1]).id
    times = {("cluster", "optimized"): own_ms, ("library", "library"): library_ms, ("flashinfer", "peer"): peer_ms}
    records = [
        Record(
            kind="bench",
            run_id="r",
            status="OK",
            environment={},
            op="sample",
            kernel=name,
            role=role,
            case_id=case,
            basis="measured",
            latency_median_ms=ms,
            least_bytes=512.0 * 128256 * 4,
            ceilings=ceilings,
        )
        for (name, role), ms in times.items()
        if ms
    ]
    monkeypatch.setattr(sampling, "measure", lambda *arguments: (records, False))
    context = Context(tmp_path, "cuda", False, 10.0)
    found = sampling.reads(context, **{**entry.arguments, "cases": [case]})
    assert found.bar == bar
    assert bar == "UNMEASURED" or found.figures[case].startswith("cluster: "), found.figures

"""The ops that a difference touches, and the kernels and cases of these ops that are compared."""

import re
from pathlib import Path

import pytest
import torch

from rooflab.bench.ab import ab_worker
from rooflab.bench.ab.sides import Side, Subset, check_names, largest, two_kernels, two_trees
from rooflab.bench.revisions.changes import touched_ops, users
from rooflab.kernels.registry import get_op

ROOT = Path(__file__).parents[2]
OPS = ["gemm", "rmsnorm", "rope"]


def test_an_op_whose_code_another_one_uses_touches_that_too():
    found = users((ROOT,), ("flash_attention", "paged_attention", "gemm"))
    assert found["flash_attention"] >= {"paged_attention"} and not found["gemm"] - {"gemm"}
    ops = ["flash_attention", "gemm", "paged_attention"]
    assert touched_ops(["reference/flash_attention.py"], ops, users=found) == ["flash_attention", "paged_attention"]
    assert touched_ops(["reference/paged_attention.py"], ops, users=found) == ["paged_attention"]


def test_what_is_used_through_another_op_is_used(tmp_path):
    for name, text in (
        ("reference/one.py", "import torch"),
        ("reference/two.py", "from rooflab.reference.one import helper"),
        ("kernels/three/naive.py", "def fn():\n    from rooflab.kernels.two import tile"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert users((tmp_path,), ("one", "two", "three"))["one"] >= {"two", "three"}


TREES = Side("base", {}), Side("head", {})


def listed(**kernels):
    cases = {"cases": ["T=1", "T=512", "T=16"], "largest": ["T=512"], "taken": []}
    return {"rope": {"kernels": kernels, **cases, "schemes": ["fp32", "bf16"]}}


def test_the_baseline_decides_what_must_be_there():
    a = listed(naive=None, library=None, fused="UNSUPPORTED: needs a CUDA device", broken=None)
    b = listed(naive=None, fused="UNSUPPORTED: needs a CUDA device", fresh=None, broken="UNSUPPORTED: no longer")
    comparison, notes = two_trees(*TREES, (a, b), Subset())
    assert comparison.keys == ("rope/naive T=512 fp32", "rope/library T=512 fp32", "rope/broken T=512 fp32")
    assert "removed or renamed" in comparison.missing("rope/library T=512 fp32")
    assert comparison.missing("rope/naive T=512 fp32") is None
    assert comparison.missing("rope/broken T=512 fp32") is None  # its check will fail, by its own reason
    assert notes == [
        "not timed: rope/fused: UNSUPPORTED: needs a CUDA device",
        "rope/fresh is new in head: nothing to compare it with",
    ]


def test_an_op_or_a_case_that_is_gone_is_missing():
    b = {"rope": {**listed(naive=None)["rope"], "cases": ["T=1"]}}
    comparison, _ = two_trees(*TREES, (listed(naive=None), b), Subset(suite="smollm2_135m"))
    assert [comparison.missing(key) is None for key in comparison.keys] == [True, False, False]
    gone, _ = two_trees(*TREES, (listed(naive=None), {}), Subset())
    assert "removed or renamed" in gone.missing(gone.keys[0])


def test_a_name_that_neither_revision_has_is_refused():
    for wanted, sentence in (
        (Subset(ops=("rop",)), "op: expected one of rope, got 'rop'"),
        (Subset(kernels=("naive", "fsued")), "kernel: expected one of library, naive, got 'fsued'"),
        (Subset(schemes=("fp8",)), "scheme: expected one of bf16, fp32, got 'fp8'"),
        (Subset(ops=("rope",), suite="lama"), "suite: expected one that rope has, got 'lama'"),
    ):
        none = {"rope": {**listed(naive=None)["rope"], **({"cases": [], "largest": []} if wanted.suite else {})}}
        other = {"rope": {**none["rope"], "kernels": {"library": None}}}
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            check_names((none, other), wanted)
    check_names((listed(naive=None), none), Subset(("rope",), ("naive",), (), "smollm2_135m", ("fp32",)))


def test_an_op_without_the_named_case_is_left_out_and_a_case_of_no_op_is_refused():
    case = "T=1,H=576,eps=1e-05"
    job = {"ops": ("rmsnorm", "softmax", "rope"), "suite": "smoke", "cases": (case, "T=1,H=576")}
    found = ab_worker.listing(job, torch.device("cpu"))
    assert {op: found[op]["taken"] for op in found} == {"rmsnorm": [case], "softmax": ["T=1,H=576"], "rope": []}
    wanted = Subset(cases=(case,))
    found["softmax"]["taken"] = []
    comparison, notes = two_trees(*TREES, (found, found), wanted)
    assert {target.op for target in comparison.a.targets.values()} == {"rmsnorm"}
    assert f"rope has nothing to compare: base has no such case as {case} of it" in notes
    check_names((found, found), wanted)
    del found["rmsnorm"]
    with pytest.raises(ValueError, match="case: expected one that an op has, got 'T=1,H=576,eps=1e-05'"):
        check_names((found, found), wanted)


def test_the_largest_cases_are_those_of_most_flops_and_of_most_bytes():
    def ids(op, suite="llama3_8b"):
        spec = get_op(op)
        return [case.id for case in largest(spec, spec.get_cases(suite))]

    assert [case.split(",layout")[0] for case in ids("gemm")] == ["M=2048,N=28672,K=4096", "M=16,N=128256,K=4096"]
    assert ids("embedding") == ["T=2048,V=128256,H=4096"], "it has no FLOPs to tell its cases by"
    assert len(ids("rmsnorm")) == 1 and "top_p=0.95" in ids("sample")[0]
    comparison = two_kernels(Subset(("gemm",), ("naive", "library")))
    assert [target.case_id for target in comparison.a.targets.values()] == ids("gemm", "smollm2_135m")


def test_names_that_are_not_there_are_refused():
    for wanted, named in (
        (Subset((), ("naive", "library")), "kernel: expected one op and two different kernels"),
        (Subset(("rmsnorm",), ("naive", "nothing")), "kernel: rmsnorm has"),
        (Subset(("rmsnorm",), ("naive", "library"), suite="none"), "suite: rmsnorm has"),
        (Subset(("rmsnorm",), ("naive", "library"), schemes=("fp8",)), "scheme: rmsnorm has"),
        (Subset(("rmsnorm",), ("naive", "library"), cases=("K=1",)), "case: rmsnorm takes"),
    ):
        with pytest.raises(ValueError, match=named):
            two_kernels(wanted)
    comparison = two_kernels(Subset(ops=("gemm_fp8",), kernels=("naive", "library"), suite="smoke"))
    assert comparison.keys and all(key.endswith("fp8_e4m3") for key in comparison.keys), "where no scheme is named"


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("kernels/gemm/tensor_core.py", ["gemm"]),
        ("kernels/rope/_rotate.py kernels/gemm/choices.json", ["gemm", "rope"]),
        ("reference/rmsnorm.py", ["rmsnorm"]),
        *((file, OPS) for file in ("kernels/registry.py", "kernels/_shared/tiles.py", "kernels/lib/stream.cu")),
        ("reference/spec.py", OPS),
        *((file, OPS) for file in ("roofline/model.py", "bench/core/timers/timing.py", "constraints.txt")),
        ("roofline/plot.py bench/show.py README.md tests/x.py engine/llm.py results/a", []),
        ("kernels/gemm_fp8/naive.py", []),
    ],
)
def test_a_kernels_file_touches_its_op_and_a_shared_file_all(changed, touched):
    assert touched_ops(changed.split(), OPS) == touched

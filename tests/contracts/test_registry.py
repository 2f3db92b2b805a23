"""The contracts of specs and kernels: over everything that is registered, and for what comes from outside."""

import dataclasses
import inspect
import json
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from op_kernels import own_registry  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode

from rooflab.bench.core.call import packed
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES, Case, OpSpec, get_scheme
from rooflab.roofline.model import Cost

MODEL_SUITES = {"smollm2_135m", "qwen3_0_6b", "llama3_8b"}
every_op = pytest.mark.parametrize("spec", registry.ops().values(), ids=lambda spec: spec.name)


def bits(tensor):
    """Its bytes, so that a NaN equals itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


@every_op
def test_roles_of_an_op(spec):
    found = registry.kernels(spec.name)
    roles = [kernel.role for kernel in found.values()]
    assert roles.count("naive") == 1 and found["naive"].role == "naive"
    assert (roles.count("library") == 1) != (spec.no_library is not None), "a library kernel, or why there is none"
    assert any(kernel.role == "optimized" and kernel.backend == "triton" for kernel in found.values())


@every_op
def test_suites_and_case_ids(spec):
    assert {"smoke", "edge"} | MODEL_SUITES <= set(spec.cases)
    for suite, cases in spec.cases.items():
        assert cases, suite
        ids = [case.id for case in cases]
        assert len(set(ids)) == len(ids), f"{suite}: two cases of one id"
        for case in cases:
            assert Case.parse(case.id) == case and spec.check_case(case) == case
            assert json.loads(json.dumps(dict(case))) == dict(case)


@every_op
def test_inputs_depend_on_the_seed_alone_and_the_reference_changes_none_of_them(spec):
    case, device = spec.cases["smoke"][0], torch.device("cpu")
    first, again, other = (spec.make_inputs(case, SCHEMES["fp32"], device, seed) for seed in (0, 0, 1))
    assert list(first) == [parameter.name for parameter in spec.parameters if parameter.name in first]
    assert 1 <= len(spec.oracle(first)) <= len(spec.outputs)
    tensors = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
    for name in tensors:
        assert bits(first[name]).equal(bits(again[name])), name
    assert any(not torch.equal(first[name], other[name]) for name in tensors if first[name].is_floating_point())


@every_op
def test_a_word_that_a_case_may_not_have_is_refused_by_its_name(spec):
    for case in (*spec.cases["smoke"], *spec.cases["edge"]):
        for key in (key for key, value in case.items() if isinstance(value, str)):
            with pytest.raises(ValueError, match=f"^{key}: expected .*, got 'colour'$"):
                spec.make_inputs(case.but(**{key: "colour"}), SCHEMES[spec.schemes[0]], torch.device("cpu"), 0)


def test_case_text_round_trips_and_refuses_nonsense():
    case = Case(M=4096, layout="NT", causal=True, p=0.5)
    assert case.id == "M=4096,layout=NT,causal=true,p=0.5" and Case.parse(case.id) == case
    for text in ("", "M", "M=", "=3", "M=1,M=2", "M=1,,N=2"):
        with pytest.raises(ValueError, match="case: expected comma-separated KEY=VALUE"):
            Case.parse(text)
    with pytest.raises(ValueError, match="scheme: expected one of fp32"):
        get_scheme("fp64")


def double(x, scale=2.0, *, offset=0.0):
    return x.double() * scale + offset


@pytest.fixture
def toy_op(own_registry):  # noqa: F811
    """An op from outside the tree."""
    spec = OpSpec(
        name="toy",
        reference=double,
        make_inputs=lambda case, scheme, device, seed: {"x": torch.ones(case["n"], device=device), "scale": 2.0},
        cost=lambda args: Cost(args.x.nbytes, args.x.nbytes, vector_flops=args.x.numel()),
        outputs=("y",),
        cases={"smoke": (Case(n=3),)},
        tolerance=lambda inputs, oracle, scheme: tuple(torch.zeros_like(value) for value in oracle),
    )
    return registry.add_op(spec)


def register_toy(fn, **changes):
    options = {"op": "toy", "name": "naive", "role": "naive", "backend": "torch", **changes}
    return registry.register(**options)(fn)


def toy(x, scale=2.0):
    """`offset` came later: keyword-only, off by default, it may be missing."""
    return x * scale


def test_a_kernel_takes_the_reference_s_arguments_and_may_take_out(toy_op):
    for wrong, found in [
        (lambda y, scale=2.0: y, r"x, as in toy\(x, scale=2.0, \*, offset=0.0\), got y"),
        (lambda scale=2.0: scale, "x, as in .*, got scale=2.0"),
        (lambda scale, x: x, "x, as in .*, got scale"),
        (lambda x: x, "scale=2.0, as in .*, got none"),
        (lambda x, scale=3.0: x, "scale=2.0, as in .*, got scale=3.0"),
    ]:
        with pytest.raises(TypeError, match=f"expected the argument {found}"):
            register_toy(wrong)
    with pytest.raises(TypeError, match="expected no other argument, as in .*, got y=1"):
        register_toy(lambda x, scale=2.0, y=1: x)
    register_toy(toy)
    register_toy(lambda x, scale=2.0, out=None: x, name="with_out", role="optimized")
    taken = {name: kernel.accepted for name, kernel in registry.kernels("toy").items()}
    assert "out" in taken["with_out"] and "out" not in taken["naive"]
    assert torch.equal(registry.get_kernel("toy", "naive")(x=torch.ones(2), offset=0.0), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="UNSUPPORTED: toy/naive: it has no 'offset'"):
        registry.get_kernel("toy", "naive")(x=torch.ones(2), offset=1.0)


def test_prepare_is_given_what_it_names_of_what_lies_beside_a_weight():
    naive = registry.get_kernel("gemm_w4a16", "naive")
    kernel = dataclasses.replace(naive, prepare=lambda b, zero: (b, zero))
    assert packed(kernel.prepare, "b", {"a": 1, "b": 2, "scale": 3, "zero": 4}) == (2, 4)
    with pytest.raises(TypeError, match="prepare asks for 'a', expected one of .*scale"):
        register_toy(naive.fn, op="gemm_w4a16", name="other", role="optimized", prepare=lambda b, a: b)


def test_names_that_are_taken_or_unknown_are_refused(toy_op):
    register_toy(toy)
    for attempt, words in [
        (lambda: register_toy(toy), "toy/naive is registered already"),
        (lambda: registry.add_op(dataclasses.replace(toy_op)), "op: 'toy' is registered already"),
        (lambda: register_toy(toy, name="plain"), "role naive is the one named 'naive'"),
        (lambda: register_toy(toy, role="best"), "role: expected one of naive"),
        (lambda: register_toy(toy, op="no_such_op"), "op: expected one of"),
        (lambda: registry.get_op("gem"), "op: expected one of .*gemm.*got 'gem'"),
        (lambda: registry.get_kernel("gemm", "fastest"), "kernel: gemm has naive, library.*got 'fastest'"),
    ]:
        with pytest.raises(ValueError, match=words):
            attempt()


def test_a_kernel_of_triton_launches_on_the_gpu_of_its_tensors(toy_op, monkeypatch):
    """Triton launches on the current GPU: a pointer of another is an illegal access there."""
    current = [0]

    @contextmanager
    def use(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", use)

    def toy(x, scale=2.0):
        """Where it would launch."""
        return current[0], scale

    ours = register_toy(toy, name="ours", role="optimized", backend="triton")
    torchs = register_toy(toy, name="library", role="library")
    assert ours is registry.get_kernel(toy_op.name, "ours").fn and inspect.unwrap(ours) is toy and torchs is toy
    with FakeTensorMode():
        here, there = torch.empty(4, device="cuda:0"), torch.empty(4, device="cuda:1")
    assert [ours(here), ours(there), ours(x=there, scale=3.0)] == [(0, 2.0), (1, 2.0), (1, 3.0)]
    assert ours(torch.empty(4)) == (0, 2.0) and current == [0]


def test_an_entry_point_is_loaded_and_a_broken_one_is_unavailable_by_its_name(monkeypatch, toy_op, rooflab):
    entry_point = lambda name, load: SimpleNamespace(name=name, load=load)
    points = [
        entry_point("leaves", lambda: sys.exit("no GPU\nsorry")),
        entry_point("breaks", lambda: register_toy(lambda y: y, name="theirs", role="optimized")),
        entry_point("works", lambda: register_toy(lambda x, scale=2.0: x * scale)),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "rooflab.kernels" else [])
    monkeypatch.setattr(registry, "broken_plugins", {})
    registry.load_plugins.__wrapped__()
    assert registry.get_kernel("toy", "naive").role == "naive"
    status, out, _ = rooflab("list", "rmsnorm", "--json")
    reasons = {row["name"]: row["reason"] for row in json.loads(out) if not row["available"]}
    assert status == 0 and reasons["leaves"] == "UNAVAILABLE: plug-in leaves cannot be imported: SystemExit: no GPU"
    assert "breaks cannot be imported: TypeError: toy/theirs: expected the argument x, as in toy" in reasons["breaks"]
    for words in (("check", "toy", "--kernel", "theirs"), ("bench", "unknown")):
        status, _, err = rooflab(*words)
        assert status == 2 and f"got {words[-1]!r}; {reasons['leaves']}; {reasons['breaks']}\n" in err


IMPORTS = """
import sys
from rooflab.bench.checks.drawn import drawn_checks
from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.select import Selection
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES

drawn_checks(Selection.of('rmsnorm', ['native'], ['smoke'], None, None, 'cpu'))
print(*(name for name in sys.modules if name.startswith('rooflab.')))
rmsnorm, naive = registry.get_op('rmsnorm'), registry.get_kernel('rmsnorm', 'naive')
assert check_kernel(naive, rmsnorm, rmsnorm.cases['smoke'][0], SCHEMES['fp32']).status == 'OK'
registry.every_kernel()
print(*sys.modules)
"""


def test_a_command_imports_the_kernels_of_its_op_and_no_engine_emulator_or_compiler():
    """What torch compiles with would take each process 2 s."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    drawn, checked = done.stdout.splitlines()
    assert not [name for name in drawn.split() if name.startswith(("rooflab.engine", "rooflab.bench.emulat"))]
    ops = {name.split(".")[2] for name in drawn.split() if name.count(".") > 2 and ".kernels." in name}
    assert ops - {"lib"} == {"rmsnorm", "fused_add_rmsnorm"}, "native has one source for both"
    assert not {"torch.nn.attention.varlen", "torch._dynamo", "sympy", "flashinfer"} & {*checked.split()}


def test_spec_refuses_contradictions():
    common = {"name": "t", "reference": double, "make_inputs": None, "outputs": ("y",), "cases": {}}
    common["cost"] = lambda args: None
    with pytest.raises(ValueError, match="exactly one of tolerance and compare"):
        OpSpec(**common)
    with pytest.raises(ValueError, match="'z' is not an argument"):
        OpSpec(**common, tolerance=lambda *_: (), mutates=("z",))
    with pytest.raises(TypeError, match=r"expected a cost of one object, cost\(args\), got cost\(x, weight\)"):
        OpSpec(**{**common, "cost": lambda x, weight: None}, tolerance=lambda *_: ())


@pytest.mark.parametrize(("triton", "works"), [("3.6.0", False), ("3.7.1", True)])
def test_an_interpreter_that_fails_with_new_numpys_is_refused_in_a_sentence(triton, works, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(registry, "version", {"triton": triton}.get)
    found = registry.get_kernel("rmsnorm", "fused").why_not_here(torch.device("cpu"))
    assert (found and found.reason) == (None if works else "Triton's interpreter needs Triton 3.7")

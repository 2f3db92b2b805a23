"""The contracts of specs and kernels: over everything that is registered, and for what comes from outside."""

import dataclasses
import inspect
import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from op_kernels import own_registry  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode

from rooflab.bench.core.call import packed
from rooflab.bench.core.select import file_of
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES, Case, OpSpec, as_tuple, get_scheme
from rooflab.roofline.model import Cost, Traffic

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
def test_cost_and_traffic_read_only_shapes(spec):
    """On meta tensors a model-sized case is priced without being allocated, and nothing reads its values."""
    for case in (*spec.cases["smoke"], *spec.cases["llama3_8b"]):
        inputs = spec.make_inputs(case, SCHEMES["bf16"], torch.device("meta"), 0)
        large = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
        assert all(value.is_meta for value in large if value.numel() > 65536)
        cost = spec.cost_of(inputs)
        assert isinstance(cost, Cost) and cost.bytes > 0 and cost.launches == 1
        for kernel in registry.kernels(spec.name).values():
            assert kernel.traffic is not None, f"{kernel.id} models no traffic"
            if kernel.traffic == "counted" and kernel.why_not_args(inputs) is not None:
                continue
            traffic = kernel.traffic_of(inputs)
            assert isinstance(traffic, Traffic) and traffic.launches >= 1
            assert traffic.bytes >= cost.bytes * 0.999, f"{kernel.id} claims to move less than {case.id} needs"


@every_op
def test_inputs_depend_on_the_seed_alone(spec):
    case, device = spec.cases["smoke"][0], torch.device("cpu")
    first, again, other = (spec.make_inputs(case, SCHEMES["fp32"], device, seed) for seed in (0, 0, 1))
    assert list(first) == [parameter.name for parameter in spec.parameters if parameter.name in first]
    tensors = [name for name, value in first.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    for name in tensors:
        assert bits(first[name]).equal(bits(again[name])), name
    assert any(not torch.equal(first[name], other[name]) for name in tensors)


@pytest.mark.parametrize(
    ("op", "case", "message"),
    [
        ("gemm", "M=1,N=1,K=1,layout=TT,bias=false", "layout: expected NN, NT or TN, got 'TT'"),
        ("gemm_silu_and_mul", "M=1,I=1,K=1,layout=TN", "layout: expected NN or NT, got 'TN'"),
        ("gemm_fp8", "M=1,N=1,K=1,scales=row,bias=false", "scales: expected tensor or block, got 'row'"),
        ("kv_cache_write", "T=17,H_kv=1,D=4,num_blocks=2,block_size=8,skipped=0", "case: expected skipped <= T <= num"),
    ],
)
def test_a_case_that_has_no_inputs_is_refused(op, case, message):
    spec = registry.get_op(op)
    with pytest.raises(ValueError, match=message):
        spec.make_inputs(Case.parse(case), SCHEMES[spec.schemes[0]], torch.device("cpu"), 0)


@every_op
def test_the_reference_changes_none_of_its_arguments(spec):
    inputs = spec.make_inputs(spec.cases["smoke"][0], SCHEMES["fp32"], torch.device("cpu"), 0)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    outputs = spec.oracle(inputs)
    assert 1 <= len(outputs) <= len(spec.outputs)
    for name, value in before.items():
        assert bits(value).equal(bits(inputs[name])), name


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


def test_registering_checks_the_signature(toy_op):
    register_toy(lambda x, scale=2.0: x * scale)  # `offset` came later: keyword-only, off by default, may be missing
    for wrong, message in [
        (lambda y, scale=2.0: y, r"expected the argument x, as in toy\(x, scale=2.0, \*, offset=0.0\), got y"),
        (lambda scale=2.0: scale, "expected the argument x, as in .*, got scale=2.0"),
        (lambda scale, x: x, "expected the argument x, as in .*, got scale"),
        (lambda x: x, "expected the argument scale=2.0, as in .*, got none"),
        (lambda x, scale=3.0: x, "expected the argument scale=2.0, as in .*, got scale=3.0"),
        (lambda x, scale=2.0, y=1: x, "expected no other argument, as in .*, got y=1"),
    ]:
        with pytest.raises(TypeError, match=message):
            register_toy(wrong, name="other", role="optimized")
    register_toy(lambda x, scale=2.0, out=None: x * scale, name="with_out", role="optimized")
    assert (
        "out" in registry.get_kernel("toy", "with_out").accepted
        and "out" not in registry.get_kernel("toy", "naive").accepted
    )


def test_prepare_is_given_what_it_names_of_what_lies_beside_a_weight():
    spec = registry.get_op("gemm_w4a16")
    kernel = dataclasses.replace(registry.get_kernel(spec.name, "naive"), prepare=lambda b, zero: (b, zero))
    assert packed(kernel.prepare, "b", {"a": 1, "b": 2, "scale": 3, "zero": 4}) == (2, 4)
    with pytest.raises(TypeError, match="gemm_w4a16/other: prepare asks for 'a', expected one of .*scale"):
        registry.register(op=spec.name, name="other", role="optimized", backend="torch", prepare=lambda b, a: b)(
            registry.get_kernel(spec.name, "naive").fn
        )


def test_registering_twice_or_by_a_wrong_name_raises(toy_op):
    register_toy(lambda x, scale=2.0: x)
    with pytest.raises(ValueError, match="toy/naive is registered already"):
        register_toy(lambda x, scale=2.0: x)
    with pytest.raises(ValueError, match="role naive is the one named 'naive'"):
        register_toy(lambda x, scale=2.0: x, name="plain")
    with pytest.raises(ValueError, match="role: expected one of naive"):
        register_toy(lambda x, scale=2.0: x, role="best")
    with pytest.raises(ValueError, match="op: expected one of"):
        registry.register(op="no_such_op", name="naive", role="naive", backend="torch")


def test_an_argument_it_has_not_got_is_refused_by_name(toy_op):
    register_toy(lambda x, scale=2.0: x * scale)
    kernel = registry.get_kernel("toy", "naive")
    assert torch.equal(kernel(x=torch.ones(2), offset=0.0), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="UNSUPPORTED: toy/naive: it has no 'offset'"):
        kernel(x=torch.ones(2), offset=1.0)


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match="op: expected one of .*gemm.*got 'gem'"):
        registry.get_op("gem")
    with pytest.raises(ValueError, match="kernel: gemm has naive, library.*got 'fastest'"):
        registry.get_kernel("gemm", "fastest")


OUTSIDE = """
import torch
from rooflab.kernels.registry import add_op, register
from rooflab.reference.spec import Case, OpSpec, randn
from rooflab.roofline.model import Cost

SPEC = add_op(OpSpec(
    name="outside_relu",
    reference=lambda x: x.double().clamp(min=0),
    make_inputs=lambda case, scheme, device, seed: {
        "x": randn(case["n"], dtype=scheme.activation, device=device, seed=seed)
    },
    cost=lambda args: Cost(args.x.nbytes, args.x.nbytes),
    outputs=("y",),
    cases={"smoke": (Case(n=33),)},
    tolerance=lambda inputs, oracle, scheme: tuple(torch.zeros_like(value) for value in oracle),
))

@register(op="outside_relu", name="naive", role="naive", backend="torch")
def relu(x):
    return x.relu()
"""


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


@pytest.mark.usefixtures("own_registry")
def test_an_op_and_a_kernel_from_a_file_work_like_ours(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OUTSIDE)
    (kernel,) = registry.load_file(file)
    spec = registry.get_op("outside_relu")
    inputs = spec.make_inputs(spec.cases["smoke"][0], SCHEMES["fp32"], torch.device("cpu"), 0)
    verdicts = spec.judge(as_tuple(kernel(**inputs)), spec.oracle(inputs), inputs, SCHEMES["fp32"])
    assert [verdict.passed for verdict in verdicts] == [True] and "outside_relu" in registry.ops()


@pytest.mark.usefixtures("own_registry")
def test_an_object_that_is_called_is_known_by_the_file_that_registers_it(tmp_path):
    file, head = tmp_path / "mine.py", "from rooflab.kernels.registry import register"
    words = "register(op='softmax', name='object', role='optimized', backend='torch')(Made())"
    file.write_text(f"{head}\nclass Made:\n    def __call__(self, x):\n        return x.softmax(-1)\n{words}\n")
    (kernel,) = registry.load_file(file)
    assert file_of(kernel) == file.resolve() == file_of(dataclasses.replace(kernel, file=None))


def test_a_file_that_is_not_one_or_registers_nothing_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="empty.py registers no kernel"):
        registry.load_file(tmp_path / "empty.py")
    with pytest.raises(ValueError, match="expected a Python file, got"):
        registry.load_file(tmp_path / "missing.py")


class EntryPoint:
    def __init__(self, name, load):
        self.name, self.load = name, load


def test_an_entry_point_is_loaded_and_a_broken_one_is_unavailable_by_its_name(monkeypatch, toy_op, rooflab):
    points = [
        EntryPoint("leaves", lambda: sys.exit("no GPU\nsorry")),
        EntryPoint("breaks", lambda: register_toy(lambda y: y, name="theirs", role="optimized")),
        EntryPoint("works", lambda: register_toy(lambda x, scale=2.0: x * scale)),
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


def test_a_check_imports_the_kernels_of_its_op_and_neither_engine_nor_emulator():
    code = (
        "import sys; from rooflab.bench.core.select import Selection;"
        "from rooflab.bench.checks.drawn import drawn_checks;"
        "drawn_checks(Selection.of('rmsnorm', ['native'], ['smoke'], None, None, 'cpu'));"
        "print(*(name for name in sys.modules if name.startswith('rooflab.')))"
    )
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in names if name.startswith(("rooflab.engine", "rooflab.bench.emulat"))]
    ops = {name.split(".")[2] for name in names if name.count(".") > 2 and name.startswith("rooflab.kernels.")}
    assert ops - {"lib"} == {"rmsnorm", "fused_add_rmsnorm"}, "native has one source for both"


def test_spec_refuses_contradictions():
    common = {"name": "t", "reference": double, "make_inputs": None, "outputs": ("y",), "cases": {}}
    common["cost"] = lambda args: None
    with pytest.raises(ValueError, match="exactly one of tolerance and compare"):
        OpSpec(**common)
    with pytest.raises(ValueError, match="'z' is not an argument"):
        OpSpec(**common, tolerance=lambda *_: (), mutates=("z",))


def test_an_interpreter_that_fails_with_new_numpys_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel, here = registry.get_kernel("rmsnorm", "fused"), torch.device("cpu")
    for triton, reason in (("3.6.0", "Triton's interpreter needs Triton 3.7"), ("3.7.1", None)):
        monkeypatch.setattr(registry, "version", lambda name, triton=triton: triton)
        found = kernel.why_not_here(here)
        assert (found and found.reason) == reason


def test_a_cost_of_many_arguments_is_named():
    spec = registry.get_op("rmsnorm")
    with pytest.raises(TypeError, match=r"rmsnorm: expected a cost of one object, cost\(args\), got cost\(x, weight\)"):
        dataclasses.replace(spec, cost=lambda x, weight, eps=1e-6: spec.cost(x))

"""flashinfer-bench's folders: definitions and the ops that compute them, traces as records, and faults of files."""

import json
import re

import pytest
from test_exchange import foreign
from test_exchange_tritonbench import METRICS

from rooflab.bench.exchange.convert import read
from rooflab.bench.exchange.flashinfer import definitions_in, read_dataset
from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark
from rooflab.bench.exchange.tritonbench import read_tritonbench

NORM = "def run(hidden_states, weight):\n    eps = 1e-5\n    return hidden_states"


def tensor(dtype, *shape):
    return {"shape": list(shape) or None, "dtype": dtype}


def define(name, op_type, axes, dtype, outputs=("out",), reference="def run(*given): pass", **shapes):
    """A definition as its file holds it: an axis is const where it has a number; a shape is the text of its axes."""
    sizes = {axis: {"type": "const", "value": size} if size else {"type": "var"} for axis, size in axes.items()}
    inputs = {key: tensor("int32" if "ind" in key else dtype, *shape.split()) for key, shape in shapes.items()}
    results = {key: tensor(dtype, *next(iter(shapes.values())).split()) for key in outputs}
    described = {"name": name, "op_type": op_type, "tags": ["status:verified"], "description": ""}
    return described | {"axes": sizes, "inputs": inputs, "outputs": results, "reference": reference}


def definitions():
    gemm = {"axes": {"M": None, "N": 48, "K": 32}, "A": "M K", "B": "N K", "outputs": ("C",)}
    norm = {"axes": {"T": None, "H": 64}, "hidden_states": "T H", "weight": "H", "reference": NORM}
    heads = {"T": None, "S": None, "H": 4, "G": 2, "D": 64, "L": None}
    paged = {"q": "T H D", "k_cache": "P B G D", "v_cache": "P B G D", "kv_indptr": "L", "kv_indices": "I"}
    pages = {**heads, "P": None, "B": 16, "I": None}
    ragged = {"q": "T H D", "k": "S G D", "v": "S G D", "qo_indptr": "L", "kv_indptr": "L", "sm_scale": ""}
    rope = {"q": "T H D", "k": "T G D", "cos_sin_cache": "S D", "positions": "T"}
    return [
        define("gemm_n48_k32", "gemm", dtype="float16", **gemm),
        define("gemm_fp8", "gemm", dtype="float8_e4m3fn", **gemm),
        define("rmsnorm_h64", "rmsnorm", dtype="float32", **norm),
        define("fused_add_rmsnorm_h64", "rmsnorm", dtype="float16", residual="T H", **norm),
        define("gqa_paged_decode", "gqa_paged", pages, "bfloat16", **paged, kv_last_page_len="T", sm_scale=""),
        define("gqa_ragged_prefill_causal", "gqa_ragged", heads, "bfloat16", **ragged),
        define("top_k_sampling", "sampling", {"T": None, "V": 97}, "float32", probs="T V", top_k="T"),
        define("rope_neox", "rope", heads, "float32", **rope),
        define("silu_and_mul", "activation", {"T": None, "H": 64}, "float16", input="T H"),
        define("dsa_paged_decode", "dsa_paged", {"T": None}, "bfloat16", q_nope="T"),
    ]


def trace(definition, axes, solution, status="PASSED", second=0):
    environment = {"hardware": "NVIDIA_H200", "libs": {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}}
    evaluation = {"status": status, "environment": environment, "timestamp": f"2026-03-01T10:00:{second:02d}"}
    evaluation |= {"log": "", "correctness": None, "performance": None}
    if status == "PASSED":
        evaluation["correctness"] = {"max_relative_error": 0.01, "max_absolute_error": "Infinity"}
        evaluation["performance"] = {"latency_ms": 0.25, "reference_latency_ms": 0.5, "speedup_factor": 2.0}
    workload = {"uuid": f"{definition}-0", "axes": axes, "inputs": {}}
    return {"definition": definition, "workload": workload, "solution": solution, "evaluation": evaluation}


@pytest.fixture
def root(tmp_path):
    """A folder with every definition, four traces that become records, and three that do not."""
    root = tmp_path / "set"
    for definition in definitions():
        path = root / "definitions" / definition["op_type"] / f"{definition['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(definition, indent=1))
    (root / "traces" / "someone").mkdir(parents=True)
    results = [
        trace("gemm_n48_k32", {"M": 7}, "fast_v1"),
        trace("gemm_n48_k32", {"M": 7}, "wrong_v2", "INCORRECT_NUMERICAL", second=9),
        trace("fused_add_rmsnorm_h64", {"T": 5}, "norm"),
        trace("gqa_paged_decode", dict.fromkeys("TSLPI", 3), "paged"),
        trace("absent", {"T": 5}, "lost"),
        trace("gqa_paged_decode", dict.fromkeys("TSLPI", 3) | {"P": 0}, "paged"),
        trace("gemm_n48_k32", {}, "fast_v1"),
    ]
    (root / "traces" / "someone" / "all.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results))
    return root


def edited(root, definition, inputs=(), **changes):
    """The data set with one definition changed."""
    (path,) = root.rglob(f"{definition}.json")
    values = json.loads(path.read_text()) | changes
    values["inputs"] |= dict(inputs)
    path.write_text(json.dumps(values))
    return read_dataset(root)


def test_every_definition_is_mapped_or_has_a_reason(root, rooflab):
    rows = {row["definition"]: row for row in read_dataset(root).definitions}
    assert {
        name: row["op"] or row["reason"].partition(":")[0].rpartition(" are ")[0] for name, row in rows.items()
    } == {
        "gemm_n48_k32": "gemm",
        "gemm_fp8": "its dtypes",
        "rmsnorm_h64": "rmsnorm",
        "fused_add_rmsnorm_h64": "fused_add_rmsnorm",
        "gqa_paged_decode": "paged_attention",
        "gqa_ragged_prefill_causal": "flash_attention",
        "top_k_sampling": "sample",
        "rope_neox": "rope",
        "silu_and_mul": "silu_and_mul",
        "dsa_paged_decode": "",
    }
    assert rows["dsa_paged_decode"]["reason"] == "no op here computes 'dsa_paged'"
    assert (rows["gemm_n48_k32"]["scheme"], rows["gemm_n48_k32"]["traces"]) == ("fp16", 3)
    status, out, _ = rooflab("import", "flashinfer", root, "--json")
    assert status == 0 and len(json.loads(out)["definitions"]) == len(rows) and len(json.loads(out)["rows"]) == 4
    with pytest.raises(ValueError, match="^path: expected one, got 2"):
        read("flashinfer", [root, root])


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("rmsnorm_h64", {"inputs": {"bias": tensor("float32", "H")}}, "its inputs are"),
        ("rmsnorm_h64", {"inputs": {"weight": tensor("float4_e2m1", "H")}}, "float32, float4_e2m1"),
        ("silu_and_mul", {"name": "gelu_and_mul"}, "gelu_and_mul is not silu_and_mul"),
        ("gemm_n48_k32", {"inputs": {"A": tensor("float16", "M")}}, r"A \['M'\] and B"),
    ],
)
def test_what_a_definition_does_not_say_is_not_guessed(root, name, change, reason):
    reasons = [row["reason"] for row in edited(root, name, **change).definitions]
    assert any(re.search(reason, each) for each in reasons), reasons


def test_traces_become_records_that_can_be_compared_with_ours(root):
    found = read_dataset(root)
    passed, wrong, norm, paged = found.records
    assert (passed.op, passed.kernel, passed.case_id) == ("gemm", "fast_v1", "M=7,N=48,K=32,layout=NT,bias=false")
    assert (passed.latency_median_ms, passed.scheme, passed.timer) == (0.25, "fp16", "imported: flashinfer-bench")
    assert passed.environment["gpu"]["name"] == "NVIDIA H200" and passed.environment["triton"] == "3.6.0"
    assert passed.metrics == {"reference_latency_ms": 0.5, "speedup_factor": 2.0, "max_relative_error": 0.01}
    assert (wrong.status, wrong.latency_median_ms) == ("INCORRECT", None) and "INCORRECT_NUMERICAL" in wrong.reason
    assert (norm.op, norm.case_id) == ("fused_add_rmsnorm", "T=5,H=64,eps=1e-05")
    assert paged.op == "paged_attention" and paged.case_id.startswith("definition=gqa_paged_decode,T=3,")
    assert {(each.checked_by, each.commit) for each in found.records} == {("none", None)}
    assert [each.reason for each in found.skipped] == [
        "no definition called 'absent' is there",
        "its workload has no P",
        "its workload has no M",
        *["its max_absolute_error is Infinity"] * 3,
    ]


@pytest.mark.parametrize(
    ("name", "change", "case"),
    [
        ("rmsnorm_h64", {"reference": "x = 1 / 0\neps = 1e-3\ndef run(): 1"}, {"eps": 1e-3}),
        ("rmsnorm_h64", {"reference": "eps = 1e-3\neps = 1e-5"}, {"definition": "rmsnorm_h64"}),
        ("fused_add_rmsnorm_h64", {"name": "gemma_fused_add"}, {"weight_offset": 1.0}),
        ("gemm_n48_k32", {"inputs": {"B": tensor("float16", "K", "N")}}, {"layout": "NN", "N": 48, "K": 32}),
    ],
)
def test_an_epsilon_is_read_from_the_text_and_not_run_and_a_matrix_by_its_axes(root, name, change, case):
    edited(root, name, **change)
    found = dict(definitions_in(root)[change.get("name", name)].case({"T": 2, "M": 7}))
    assert found.items() >= case.items()


def spoilt(value):
    """The value with each part of it in turn of another type."""
    yield from (None, [], {"a": 1}, "x", -1, True)
    if isinstance(value, dict):
        yield from ({**value, key: bad} for key, item in value.items() for bad in spoilt(item))
    elif isinstance(value, list):
        yield from ([*value[:n], bad, *value[n + 1 :]] for n, item in enumerate(value) for bad in spoilt(item))


def refusals(read, path, values):
    """How often `read` refuses `values`, each part in turn of a wrong type, by one sentence with its file."""
    refused = 0
    for wrong in spoilt(values):
        path.write_text(json.dumps(wrong) + "\n")
        try:
            read()
        except ValueError as error:
            refused += 1
            assert str(error).startswith(path.name), f"{error} for {wrong}"
    return refused


@pytest.mark.parametrize("name", ["gemm_n48_k32.json", "rmsnorm_h64.json", "all.jsonl"])
def test_whatever_is_wrong_in_a_data_set_is_one_sentence_with_its_file(root, name):
    def read():
        read_dataset(root)

    (path,) = root.rglob(name)
    assert refusals(read, path, json.loads(path.read_text().split("\n{")[0])) > 10


@pytest.mark.parametrize(
    ("reader", "values"),
    [(read_pytest_benchmark, foreign()), (read_tritonbench, {"environ": {"device": "H"}, "metrics": METRICS})],
)
def test_whatever_is_wrong_in_a_file_is_one_sentence_with_its_name(tmp_path, reader, values):
    path = tmp_path / "a.json"
    assert refusals(lambda: reader(path), path, values) > 3

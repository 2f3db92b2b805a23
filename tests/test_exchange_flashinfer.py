"""flashinfer-bench data sets: definitions, their mapping to ops, inputs, and traces.  No reference runs here."""

import copy
import json
import re

import pytest
import torch
from flashinfer_set import AXES, definitions, write_data_set
from safetensors.torch import save_file
from test_exchange import METRICS, foreign

from rooflab.bench.exchange.commands import definition_rows, read_traces
from rooflab.bench.exchange.flashinfer_families import find_family, lengths_of, paged, random_batch
from rooflab.bench.exchange.flashinfer_files import Workload, read_dataset
from rooflab.bench.exchange.flashinfer_reference import make_inputs
from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark
from rooflab.bench.exchange.tritonbench import read_tritonbench
from rooflab.reference.paged_attention import reference

DECODE = "gqa_paged_decode_h4_kv2_d64_ps16"


@pytest.fixture
def root(tmp_path):
    return write_data_set(tmp_path / "set")


def edited(root, name, change):
    """The data set with one definition changed."""
    (path,) = root.rglob(f"{name}.json")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return read_dataset(root)


def inputs_of(dataset, name, seed=0, **sources):
    definition = dataset.definitions[name]
    family, _ = find_family(definition)
    workload = Workload(name, "w", AXES[name], sources)
    return make_inputs(definition, workload, family, dataset.root, seed)


def test_every_definition_is_mapped_or_has_a_reason(root):
    rows = {row["definition"]: row for row in definition_rows(read_dataset(root))}
    assert len(rows) == len(definitions())
    assert {name: row["op"] for name, row in rows.items() if row["op"]} == {
        "gemm_n48_k32": "gemm",
        "rmsnorm_h64": "rmsnorm",
        "fused_add_rmsnorm_h64": "fused_add_rmsnorm",
        DECODE: "paged_attention",
        "gqa_ragged_prefill_causal_h4_kv2_d64": "flash_attention",
        "top_k_top_p_sampling_from_probs_v97": "sample",
        "rope_with_cos_sin_cache_neox_style_d64": "rope",
    }
    assert rows["mla_paged_decode_h16"]["reason"] == "no op here computes 'mla_paged'"
    assert rows["gemm_fp8_n48_k32"]["reason"].startswith("its dtypes are float16, float8_e4m3fn")
    assert all(bool(row["op"]) != bool(row["reason"]) for row in rows.values())
    assert (rows["gemm_n48_k32"]["workloads"], rows["gemm_n48_k32"]["traces"]) == (1, 2)


def rename(name):
    return lambda values: values.update(name=name)


def drop_last_page(values):
    del values["inputs"]["kv_last_page_len"]


def no_eps(values):
    values["reference"] = "def run(hidden_states, weight):\n    eps = 1e-5\n    eps = 1e-6"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "gqa_ragged_prefill_causal_h4_kv2_d64",
            rename("gqa_ragged_prefill"),
            "its name does not say that it is causal",
        ),
        ("rope_with_cos_sin_cache_neox_style_d64", rename("rope_d64"), "its name says neither neox nor gptj"),
        (DECODE, drop_last_page, "pages of more than one token, and no kv_last_page_len"),
        ("rmsnorm_h64", rename("gemma_rmsnorm_h64"), "adds one to the weight"),
        ("rmsnorm_h64", no_eps, "neither its inputs nor its reference name one epsilon"),
        ("rmsnorm_h64", lambda values: values["inputs"].update(bias=values["inputs"]["weight"]), "its inputs are"),
        (
            "rmsnorm_h64",
            lambda values: values["inputs"]["weight"].update(dtype="float4_e2m1"),
            "weight is of the dtype",
        ),
        ("gemm_n48_k32", lambda values: values["inputs"]["A"].update(shape=["M"]), "A has 1 axes; an op here takes 2"),
        ("gemm_n48_k32", lambda values: values["inputs"]["A"].update(shape=["M", "M"]), r"A \['M', 'M'\] and B"),
    ],
)
def test_what_a_definition_does_not_say_is_not_guessed(root, name, change, reason):
    dataset = edited(root, name, change)
    assert any(re.search(reason, row["reason"]) for row in definition_rows(dataset))


def test_an_epsilon_is_read_from_the_text_and_not_run(root):
    dataset = edited(
        root, "rmsnorm_h64", lambda values: values.update(reference="x = 1 / 0\neps = 1e-3\ndef run(a): pass")
    )
    definition = dataset.definitions["rmsnorm_h64"]
    family, _ = find_family(definition)
    ((arguments),) = family.calls(definition, inputs_of(dataset, "rmsnorm_h64"))
    assert arguments["eps"] == 1e-3


def test_pages_by_offsets_become_a_table(root):
    """Each sequence's tokens, taken through our table, are those that the offsets name."""
    dataset = read_dataset(root)
    given = inputs_of(dataset, DECODE) | {"kv_last_page_len": torch.tensor([3, 16, 1], dtype=torch.int32)}
    given["kv_indptr"] = torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    (arguments,) = paged(dataset.definitions[DECODE], given)
    assert arguments["seq_lens"].tolist() == [19, 0, 65]
    assert arguments["block_table"][0].tolist() == [*given["kv_indices"][:2].tolist(), -1, -1, -1]
    out = reference(**arguments)
    assert torch.equal(out[1], torch.zeros(4, 64, dtype=torch.float64)), "a sequence without pages"
    pages = given["kv_indices"][2:7].long()
    keys, values = (given[name][pages].flatten(0, 1)[:65, 1].double() for name in ("k_cache", "v_cache"))
    weights = torch.softmax(keys @ given["q"][2, 3].double() * given["sm_scale"], 0)
    torch.testing.assert_close(out[2, 3], weights @ values)


def test_offsets_and_pages_that_do_not_fit_are_refused(root):
    dataset = read_dataset(root)
    given = inputs_of(dataset, DECODE)
    for offsets in ([1, 2, 3, 7], [0, 5, 3, 7]):
        with pytest.raises(ValueError, match="^offsets: expected a rising list from 0"):
            lengths_of(torch.tensor(offsets))
    with pytest.raises(ValueError, match="^kv_indices: expected 7 pages below 9"):
        paged(dataset.definitions[DECODE], given | {"kv_indices": given["kv_indices"] + 9})


def test_random_batches_fit_together():
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (11, 4, 64), "qo_indptr": (5,), "kv_indptr": (5,), "kv_indices": (9,), "k_cache": (12, 16, 2, 64)}
    for _ in range(20):
        found = random_batch(None, sizes | {"kv_last_page_len": (4,)}, generator)
        for name, total in (("qo_indptr", 11), ("kv_indptr", 9)):
            lengths = lengths_of(found[name])
            assert len(lengths) == 4 and sum(lengths) == total and min(lengths) >= 1
        assert len(set(found["kv_indices"].tolist())) == 9 and int(found["kv_indices"].max()) < 12
        assert 1 <= int(found["kv_last_page_len"].min()) <= int(found["kv_last_page_len"].max()) <= 16
    assert lengths_of(random_batch(None, {"k": (0, 2, 64), "kv_indptr": (4,)}, generator)["kv_indptr"]) == [0, 0, 0]


def test_inputs_are_drawn_read_and_given(root):
    dataset = read_dataset(root)
    weight = torch.arange(64, dtype=torch.float32)
    save_file({"w": weight, "short": weight[:3].clone()}, root / "weights.safetensors")
    (root / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    stored = {"type": "safetensors", "path": "weights.safetensors", "tensor_key": "w"}
    found = inputs_of(dataset, "rmsnorm_h64", weight=stored)
    assert torch.equal(found["weight"], weight) and found["hidden_states"].shape == (5, 64)
    assert torch.equal(found["hidden_states"], inputs_of(dataset, "rmsnorm_h64")["hidden_states"]), "of the same seed"
    assert not torch.equal(found["hidden_states"], inputs_of(dataset, "rmsnorm_h64", seed=1)["hidden_states"])
    assert inputs_of(dataset, DECODE, sm_scale={"type": "scalar", "value": 0.3})["sm_scale"] == 0.3
    for change, message in (
        ({"path": "none.safetensors"}, "weight: none.safetensors is not there"),
        ({"path": "../outside.safetensors"}, "weight: ../outside.safetensors lies outside of the data set"),
        ({"path": "pointer.safetensors"}, "weight: pointer.safetensors is no safetensors file"),
        ({"tensor_key": "v"}, "weight: weights.safetensors holds no 'v'"),
        ({"tensor_key": "short"}, "weight: expected .64,. of torch.float32, got .3,. of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            inputs_of(dataset, "rmsnorm_h64", weight=stored | change)


def test_traces_become_records_that_can_be_compared_with_ours(root):
    found = read_traces(read_dataset(root))
    passed, wrong = found.records
    assert (passed.op, passed.kernel, passed.case_id) == ("gemm", "fast_v1", "M=7,N=48,K=32,layout=NT,bias=false")
    assert (passed.latency_median_ms, passed.scheme, passed.timer) == (0.25, "fp16", "imported: flashinfer-bench")
    assert passed.environment["gpu"]["name"] == "NVIDIA H200" and passed.environment["triton"] == "3.6.0"
    assert passed.metrics == {"reference_latency_ms": 0.5, "speedup_factor": 2.0, "max_relative_error": 0.01}
    assert (wrong.status, wrong.latency_median_ms) == ("INCORRECT", None) and "INCORRECT_NUMERICAL" in wrong.reason
    assert {each.checked_by for each in found.records} == {"none"} and {each.commit for each in found.records} == {None}
    assert [each.reason for each in found.skipped] == ["no definition called 'absent' is there"]


def nodes(value, path=()):
    """The path of every value within a value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from nodes(item, (*path, key))


def put(value, path, item):
    if not path:
        return item
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = item
    return value


def spoiled(values):
    """`values` with each of its parts in turn of a wrong type."""
    for number, path in enumerate(nodes(values)):
        wrong = (None, [], {}, "x", -1, True, [1], {"a": 1})
        yield put(values, path, wrong[number % len(wrong)])
        yield put(values, path, wrong[(number + 3) % len(wrong)])


@pytest.mark.parametrize("name", ["gemm_n48_k32.json", "gemm_n48_k32.jsonl", "traces"])
def test_whatever_is_wrong_in_a_data_set_is_one_sentence_with_its_file(root, name):
    (path,) = root.glob("traces/*/*/*.jsonl") if name == "traces" else root.rglob(f"[dw]*/gemm/{name}")
    original = json.loads(path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text())
    refused = 0
    for values in spoiled(original):
        path.write_text(json.dumps(values) + "\n")
        try:
            dataset = read_dataset(root)
            definition_rows(dataset)
            read_traces(dataset)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(path.name), f"{error} for {values}"
    assert refused > 10


@pytest.mark.parametrize(
    ("reader", "values"),
    [(read_pytest_benchmark, foreign()), (read_tritonbench, {"environ": {"device": "H"}, "metrics": METRICS})],
)
def test_whatever_is_wrong_in_a_file_is_one_sentence_with_its_name(tmp_path, reader, values):
    path = tmp_path / "a.json"
    refused = 0
    for spoilt in spoiled(values):
        path.write_text(json.dumps(spoilt))
        try:
            reader(path)
        except ValueError as error:
            refused += 1
            assert str(error).startswith("a.json"), f"{error} for {spoilt}"
    assert refused > 3


def test_a_malformed_file_is_named(tmp_path):
    for number, (file, text, message) in enumerate(
        (
            ("definitions/gemm/gemm_n48_k32.json", "{", "^gemm_n48_k32.json, column 2: not JSON"),
            ("workloads/gemm/gemm_n48_k32.jsonl", "\n\n[]\n", "^gemm_n48_k32.jsonl, line 3: expected an object, got"),
            ("traces/a.jsonl", "nonsense\n", "^a.jsonl, line 1, column 1: not JSON"),
        )
    ):
        root = write_data_set(tmp_path / str(number))
        (root / file).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_dataset(root)


def test_a_definition_that_is_no_python_is_named(root):
    with pytest.raises(ValueError, match="^gemm_n48_k32.json, reference, line 1: not Python"):
        edited(root, "gemm_n48_k32", lambda values: values.update(reference="def run(:"))
    with pytest.raises(ValueError, match="^gemm_n48_k32.json, reference: expected a function named 'run'"):
        edited(root, "gemm_n48_k32", lambda values: values.update(reference="x = 1"))
    with pytest.raises(ValueError, match="^flashinfer: expected a folder with definitions/"):
        read_dataset(root / "definitions")

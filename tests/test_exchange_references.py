"""flashinfer-bench definitions as checks of our kernels: their references run in processes of their own."""

import json
import os
import time
from dataclasses import replace

import pytest
import torch
from flashinfer_set import AXES, definitions, workload, write_data_set, write_lines

from rooflab.bench.exchange.commands import check_notes, check_options, check_rows, run_checks
from rooflab.bench.exchange.flashinfer_check import DRAWS, Options, repeated, same_law
from rooflab.bench.exchange.flashinfer_files import read_dataset
from rooflab.bench.exchange.flashinfer_reference import References
from rooflab.bench.records import files as record_files

OPTIONS = {"kernels": None, "device": "cpu", "seed": 0, "limit": 3, "timeout_s": 120.0}


def options(ops=None, **changes):
    return check_options("flashinfer", ["folder"], True, ops, **(OPTIONS | changes))


def rows_of(dataset, chosen):
    return check_rows(run_checks(dataset, chosen, None, lambda text: None))


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Every kernel of every op that the definitions map to, on the torch backends and the interpreter."""
    dataset = read_dataset(write_data_set(tmp_path_factory.mktemp("checked")))
    chosen = options()
    out = tmp_path_factory.mktemp("records")
    results = run_checks(dataset, chosen, out, lambda text: None)
    return dataset, chosen, results, record_files.read(out)


def test_our_ops_and_kernels_compute_what_the_definitions_say(checked):
    rows = check_rows(checked[2])
    judged = [row for row in rows if row["kernel"]]
    assert [row for row in rows if row["status"] not in ("OK", "UNSUPPORTED", "UNAVAILABLE")] == []
    for name in AXES:
        right = {row["kernel"] for row in judged if row["definition"] == name and row["status"] == "OK"}
        assert {"(oracle)", "naive"} <= right, f"{name}: {right}"
    assert {row["checked_by"] for row in judged if row["status"] == "OK"} == {"torch", "interpreter"}
    assert all(row["worst"] <= 1 for row in judged if row["status"] == "OK")


@pytest.mark.gpu
def test_our_kernels_compute_what_the_definitions_say_on_a_gpu(tmp_path):
    rows = rows_of(read_dataset(write_data_set(tmp_path)), Options(device=torch.device("cuda")))
    assert [row for row in rows if row["status"] not in ("OK", "UNSUPPORTED", "UNAVAILABLE")] == []
    for name in AXES:
        right = {row["kernel"]: row["checked_by"] for row in rows if (row["definition"], row["status"]) == (name, "OK")}
        assert right["naive"] == "gpu" and len(right) > 2, f"{name}: {right}"


def test_what_cannot_be_checked_is_listed_with_its_reason(checked):
    rows = check_rows(checked[2])
    reasons = {row["definition"]: row["reason"] for row in rows if row["kernel"] is None}
    assert set(reasons) == {"gemm_fp8_n48_k32", "mla_paged_decode_h16"} and all(reasons.values())
    (bisect,) = [row for row in rows if row["kernel"] == "bisect"]
    assert "interpreter would take minutes" in bisect["reason"]
    notes = check_notes(*checked[:3])
    assert any("not compared" in note and ".lse" in note for note in notes), notes


def test_zeros_would_not_pass(checked):
    assert {weak for result in checked[2] for weak in result.weak} == set()


def test_records_of_the_checks(checked):
    records = checked[3]
    assert {each.kind for each in records} == {"check"} and {each.op for each in records} >= {"gemm", "sample"}
    first = next(each for each in records if each.op == "gemm" and each.kernel == "naive")
    assert dict(first.case) == {"definition": "gemm_n48_k32", "workload": "gemm_n48_k32-0", "M": 7}
    assert first.errors[0]["output"] == "C" and first.errors[0]["passed"]


def test_a_definition_that_means_something_else_is_seen(tmp_path):
    """Its reference is changed and our kernels are not: each, and the oracle first, must be called wrong."""
    root = write_data_set(tmp_path)
    changes = {
        "rmsnorm_h64": ("+ eps", "+ 2e-2"),
        "gqa_ragged_prefill_causal_h4_kv2_d64": ("row + 1 +", "row + 2 +"),
        "rope_with_cos_sin_cache_neox_style_d64": ("b * cos + a * sin", "b * cos - a * sin"),
        "top_k_top_p_sampling_from_probs_v97": ("values[int(k):] = 0", "values[int(k) // 2 + 1:] = 0"),
        "gqa_paged_decode_h4_kv2_d64_ps16": ("int(kv_last_page_len[b])", "k_cache.shape[1]"),
    }
    for name, (text, other) in changes.items():
        (path,) = root.rglob(f"{name}.json")
        values = json.loads(path.read_text())
        assert text in values["reference"]
        path.write_text(json.dumps(values | {"reference": values["reference"].replace(text, other)}))
    dataset = read_dataset(root)
    wanted = {name: dataset.definitions[name] for name in (*changes, "gemm_n48_k32")}
    rows = rows_of(replace(dataset, definitions=wanted), Options(kernels=("naive",)))
    for name in changes:
        statuses = {row["kernel"]: row["status"] for row in rows if row["definition"] == name}
        assert statuses["(oracle)"] == statuses["naive"] == "INCORRECT", f"{name}: {statuses}"
    assert {row["status"] for row in rows if row["definition"] == "gemm_n48_k32"} <= {"OK", "UNSUPPORTED"}


HOSTILE = {
    "raises": ("def run(A, B):\n    raise RuntimeError('no')", "RUNTIME_ERROR", "RuntimeError: no"),
    "exits": ("import os\ndef run(A, B):\n    os._exit(7)", "RUNTIME_ERROR", "ended with status 7"),
    "hangs": ("def run(A, B):\n    while True: pass", "TIMEOUT", "took more than"),
    "top level": ("raise SystemExit(3)\ndef run(A, B): pass", "RUNTIME_ERROR", "SystemExit: 3"),
    "too few": ("def run(A, B):\n    return ()", "RUNTIME_ERROR", "run returned 0 values"),
    "prints": ("def run(A, B):\n    print('{\"folder\": 1}')\n    return A @ B.T", "OK", ""),
    "patches": ("import torch\ntorch.matmul = None\ndef run(A, B):\n    return A @ B.T", "OK", ""),
    "after all": ("import torch\ndef run(A, B):\n    return torch.matmul(A, B.T)", "OK", ""),
}


def test_a_reference_harms_neither_this_process_nor_the_next(tmp_path):
    gemm = definitions()[0]
    for number, (name, (reference, _, _)) in enumerate(HOSTILE.items()):
        path = tmp_path / "definitions" / "gemm" / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(gemm | {"name": name, "reference": reference}))
        line = workload(gemm | {"name": name}, {"M": 7}) | {"solution": None, "evaluation": None}
        write_lines(tmp_path / "workloads" / f"{number}.jsonl", line)
    began = time.monotonic()
    chosen = options(["gemm"], kernels=["naive"], timeout_s=1.0)
    rows = rows_of(read_dataset(tmp_path), chosen)
    assert time.monotonic() - began < 60
    for name, (_, status, reason) in HOSTILE.items():
        own = [row for row in rows if row["definition"] == name]
        assert {row["status"] for row in own} == {status}, f"{name}: {own}"
        assert all(reason in row["reason"] for row in own)
    assert torch.matmul is not None


SEES = """
import os, sys, torch
def run(A, B):
    seen = [name for name in os.environ if name.startswith(('ROOFLAB', 'SECRET', 'PYTHON'))]
    if seen or 'rooflab' in sys.modules or sorted(os.listdir()) != ['0.inputs', 'job.json', 'stderr']:
        raise RuntimeError(f'{seen} {os.listdir()}')
    return A @ B.T
"""


def test_a_reference_sees_an_empty_folder_and_none_of_our_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s")
    monkeypatch.setenv("PYTHONPATH", "x")
    dataset = read_dataset(write_data_set(tmp_path))
    definition = dataset.definitions["gemm_n48_k32"]
    object.__setattr__(definition, "reference", SEES)
    given = {"A": torch.ones(2, 32, dtype=torch.float16), "B": torch.ones(48, 32, dtype=torch.float16)}
    before = set(os.listdir(tmp_path))
    with References("cpu", 0, 60.0) as references:
        home = references._home
        (found,) = references.run(definition, [given])
        assert torch.equal(found["C"], torch.full((2, 48), 32.0, dtype=torch.float16)), found
    assert not home.exists() and set(os.listdir(tmp_path)) == before


def test_nothing_runs_without_being_allowed_to(rooflab, tmp_path):
    root = write_data_set(tmp_path / "set")
    status, _, err = rooflab("import", "flashinfer", root, "--check")
    assert status == 2 and "expected --run-references with it" in err
    status, out, _ = rooflab("import", "flashinfer", root, "--json")
    found = json.loads(out)
    assert status == 0 and len(found["definitions"]) == len(definitions()) and len(found["rows"]) == 2
    assert rooflab("import", "flashinfer", root, "--op", "rope")[1].count("rope_with") == 1
    for arguments in (("pytest-benchmark", "a"), ("flashinfer", root, root)):
        assert rooflab("import", *arguments, "--check", "--run-references")[0] == 2
    status, _, err = rooflab("import", "flashinfer", root, "--check", "--run-references", "--kernel", "naive")
    assert status == 2 and "kernel: expected one --op with it" in err


def test_draws_of_one_law_pass_and_others_do_not():
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(50, generator=generator).mul(2).softmax(0)
    probs = repeated({"probs": torch.stack([row, row.flip(0), row])})["probs"]
    assert len(probs) == 2 * DRAWS, "the first two rows, and no more"

    def draw(law):
        return torch.multinomial(law, 1, generator=generator).squeeze(1)

    for _ in range(20):
        assert same_law("tokens", draw(probs), draw(probs), probs).passed
    tilted = probs**1.3 / (probs**1.3).sum(1, keepdim=True)
    assert not same_law("tokens", draw(tilted), draw(probs), probs).passed
    assert not same_law("tokens", draw(probs.flip(1)), draw(probs), probs).passed
    out = same_law("tokens", draw(probs) + 50, draw(probs), probs)
    assert not out.passed and out.note == "a token out of range"
    one = torch.zeros(8, 3)
    one[:, 1] = 1.0
    assert same_law("tokens", torch.ones(8).long(), torch.ones(8).long(), one).passed
    assert not same_law("tokens", torch.zeros(8).long(), torch.ones(8).long(), one).passed

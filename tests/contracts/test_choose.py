"""Choices of kernels come only from records that were checked and timed."""

import json

import pytest
import torch
from commands_in_process import run_command

from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import write
from rooflab.bench.tune.choose import choose, write_choices
from rooflab.kernels import tuning as choices
from rooflab.kernels.registry import get_kernel
from rooflab.kernels.tuning import BUCKET_ROWS, bucket_of
from rooflab.reference.spec import SCHEMES, Case

CARD = {"gpu": {"name": "NVIDIA H200"}}


def record(op, kernel, rows, latency_ms, **changes):
    fields = {
        "kind": "bench",
        "run_id": "r1",
        "status": "OK",
        "environment": CARD,
        "op": op,
        "kernel": kernel,
        "backend": "torch",
        "scheme": "bf16",
        "case": {"T": rows},
        "case_id": f"T={rows}",
        "device": "cuda",
        "checked_by": "gpu",
        "commit": "c" * 40,
        "basis": "measured",
        "latency_median_ms": latency_ms,
    }
    return Record(**{**fields, **changes})


def test_each_bucket_takes_its_fastest():
    records = [
        record("rmsnorm", "naive", 1, 1.0),
        record("rmsnorm", "library", 1, 2.0),
        record("rmsnorm", "naive", 512, 9.0),
        record("rmsnorm", "library", 512, 3.0),
    ]
    chosen = {bucket: entry["kernel"] for bucket, entry in choose("rmsnorm", records).items()}
    assert chosen["rows:1"] == "naive" and chosen["rows:512"] == "library"
    assert chosen["rows:16"] == "naive" and chosen["rows:inf"] == "library"  # by the nearest number of rows
    assert set(chosen) == {*map(bucket_of, BUCKET_ROWS)}


def test_a_kernel_timed_on_fewer_cases_does_not_win_by_that():
    records = [
        record("rmsnorm", "naive", 600, 5.0),
        record("rmsnorm", "library", 600, 4.0),
        record("rmsnorm", "library", 2000, 9.0),
        record("rmsnorm", "naive", 2000, 10.0),
        record("rmsnorm", "odd", 600, 3.0),
    ]
    assert choose("rmsnorm", records)["rows:inf"]["kernel"] == "library"


def test_one_kernel_serves_all_buckets_of_an_op_with_packed_weights():
    records = [
        record("gemm", "library", 1, 1.0, case={"M": 1}),
        record("gemm", "packed", 1, 1.1, case={"M": 1}),
        record("gemm", "library", 512, 9.0, case={"M": 512}, case_id="b"),
        record("gemm", "packed", 512, 3.0, case={"M": 512}, case_id="b"),
    ]
    assert {entry["kernel"] for entry in choose("gemm", records).values()} == {"packed"}


def test_the_file_keeps_other_devices_and_ignores_what_was_not_checked(tmp_path):
    (tmp_path / "rmsnorm").mkdir()
    file = tmp_path / "rmsnorm" / "choices.json"
    file.write_text('{"NVIDIA H100": {"rows:1": {"kernel": "fused", "record": "r0"}}}')
    unchecked = record("rmsnorm", "naive", 1, 0.1, checked_by="none")
    invalid = record("rmsnorm", "naive", 1, 0.1, status="INVALID", reason="too fast")
    assert write_choices([unchecked, invalid], tmp_path) == []
    assert write_choices([unchecked, invalid, record("rmsnorm", "library", 1, 2.0)], tmp_path) == [file]
    found = json.loads(file.read_text())
    assert found["NVIDIA H100"]["rows:1"]["kernel"] == "fused"
    assert found["NVIDIA H200"]["rows:1"] == {"kernel": "library", "record": "r1"}
    assert write_choices([record("rmsnorm", "library", 1, 2.0, device="cpu", checked_by="torch")], tmp_path) == []
    other = record("rmsnorm", "naive", 1, 1.0, environment={"gpu": {"name": "NVIDIA H100"}})
    write_choices([record("rmsnorm", "library", 1, 2.0), other], tmp_path)
    chosen = {card: found["rows:1"]["kernel"] for card, found in json.loads(file.read_text()).items()}
    assert chosen == {"NVIDIA H200": "library", "NVIDIA H100": "naive"}, "times of two cards are never compared"


def test_every_committed_choice_is_a_kernel(tmp_path):
    from rooflab.kernels import registry

    for op in registry.ops():
        file = choices.Path(choices.__file__).parent / op / "choices.json"
        for device in json.loads(file.read_text()).values() if file.is_file() else ():
            for bucket, entry in device.items():
                assert bucket in {*map(bucket_of, BUCKET_ROWS)}
                assert entry["kernel"] in registry.kernels(op) and entry["record"]
                for name, values in entry.get("configs", {}).items():
                    assert values is None or registry.get_kernel(op, name).tunable.make_config(values)


def test_an_unknown_device_has_no_choice_and_a_changed_tree_makes_none(tmp_path):
    assert choices.recorded_choice("gemm", "no such card", "rows:1") == {}
    with pytest.raises(ValueError, match="choose: expected records of a committed tree"):
        write_choices([record("rmsnorm", "naive", 1, 1.0, dirty=True)], tmp_path)
    with pytest.raises(ValueError, match="choose: expected records of a committed tree"):
        write_choices([record("rmsnorm", "naive", 1, 1.0, commit=None)], tmp_path)


def test_committed_records_choose_at_home(tmp_path, monkeypatch):
    monkeypatch.setattr(write_choices, "__defaults__", (tmp_path / "kernels",))
    own = [record("rmsnorm", "library", 1, 2.0), record("gemm", "library", 1, 1.0, case={"M": 1})]
    write(tmp_path / "h200" / "first" / "r1.jsonl", *own)
    words = ("tune", "rmsnorm", "--choose", "--records", str(tmp_path / "h200"))
    status, out, _ = run_command((*words, "--json"))
    chosen = tmp_path / "kernels" / "rmsnorm" / "choices.json"
    assert status == 0 and out == {"written": [str(chosen)]} and chosen.is_file()
    status, _, errors = run_command(("tune", "sample", *words[2:]))
    assert status == 2 and "--records: expected sample's, timed and checked on a GPU in bf16; got none" in errors
    assert "--records: expected --choose with it" in run_command(("tune", "rmsnorm", *words[3:]))[2]


EIGHT = {"block_t": 1, "num_warps": 8}


def on_gpu(kernel, rows, latency_ms, warps=None, **changes):
    """A record of rmsnorm on a GPU; the heuristic of H=1024 is 4 warps, with two rows where there are many."""
    case = {"T": rows, "H": 1024, "eps": 1e-6}
    fields = {
        "case": case,
        "case_id": f"T={rows},H=1024",
        "device": "cuda",
        "scheme": "bf16",
        "checked_by": "gpu",
        "backend": "triton",
        "environment": CARD,
        "config": {"block_t": 1 + (rows > 132), "num_warps": warps} if warps else None,
    }
    return record("rmsnorm", kernel, rows, latency_ms, **{**fields, **changes})


def test_a_config_is_written_where_it_beats_the_launchers_own_choice():
    records = [
        on_gpu("library", 1, 3.0),
        on_gpu("fused", 1, 2.0, warps=4),
        on_gpu("fused", 1, 1.0, warps=8, run_id="r8"),
        on_gpu("library", 512, 3.0),
        on_gpu("fused", 512, 1.0, warps=4),
        on_gpu("fused", 512, 1.0, warps=8),
    ]
    chosen = choose("rmsnorm", records)
    assert chosen["rows:1"] == {"kernel": "fused", "record": "r8", "scheme": "bf16", "configs": {"fused": EIGHT}}
    assert chosen["rows:512"] == {"kernel": "fused", "record": "r1"}, "no faster than the heuristic's own 4 warps"


def test_a_written_config_is_what_a_launch_then_takes(tmp_path, monkeypatch):
    (tmp_path / "rmsnorm").mkdir()
    write_choices([on_gpu("fused", 1, 1.0, warps=8), on_gpu("fused", 1, 2.0, warps=4)], tmp_path)
    monkeypatch.setattr(choices, "__file__", str(tmp_path / "tuning.py"))
    kernel, case = get_kernel("rmsnorm", "fused"), Case(T=1, H=64, eps=1e-6)
    for card, scheme, tuned in (("H200", "bf16", True), ("H200", "fp16", False), ("H100", "bf16", False)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, card=card: f"NVIDIA {card}")
        config = kernel.config_for(case, SCHEMES[scheme], torch.device("cuda"))
        assert (config == kernel.tuning.config_type(**EIGHT)) == tuned

"""One bucket of a tuning run: the launcher's own choice case by case, a dry run's check, ops whose rows none knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands_in_process import run_command
from test_tune import MINE

from rooflab.bench.records.files import RunWriter
from rooflab.bench.records.record import Record
from rooflab.bench.tune import bucket as tune_bucket
from rooflab.bench.tune import tune
from rooflab.bench.tune.search import Found
from rooflab.bench.tune.tune import tune_op
from rooflab.kernels import registry
from rooflab.kernels.configs import config_for
from rooflab.reference.spec import SCHEMES, Case


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    yield str(file)
    registry._kernels["rmsnorm"].pop("test_chunked", None)


@pytest.fixture
def tuning(mine, tmp_path):
    """A tuning run of a kernel whose own choice is 1 row for up to 100 rows, and 8 for more."""
    kernel = registry.load_file(Path(mine))[0]
    kernel = replace(kernel, heuristic=lambda case, scheme=None: kernel.config_type(1 if case["T"] <= 100 else 8))
    spec = registry.get_op("rmsnorm")
    run = tune_bucket.Tuning(spec, [kernel], [], SCHEMES["fp32"], torch.device("cpu"), RunWriter(tmp_path))
    return run, kernel


def took(rows, tokens, latency_ms):
    case = Case(T=tokens, H=64, eps=1e-6)
    return Record(
        kind="bench", run_id="r", status="OK", environment={}, op="rmsnorm", kernel="test_chunked", backend="torch",
        case_id=case.id, case=dict(case), config={"rows": rows, "wrong": False}, basis="measured", device="cpu",
        checked_by="torch", latency_median_ms=latency_ms,
    )  # fmt: skip


def test_the_launchers_choice_may_differ_within_a_bucket(tuning):
    run, kernel = tuning
    counts = {"kernel": kernel.name, "bucket": "prefill:512"}
    counts |= dict.fromkeys(("cases", "configs", "illegal", "bounded", "dropped", "failed", "left"), 0)
    own = kernel.config_type(8)
    launched = [took(1, 80, 2.0), took(8, 400, 2.0)]
    result = run._result(kernel, own, Found(), counts, [*launched, took(64, 80, 1.0), took(64, 400, 1.0)])
    assert result.best == {"rows": 64, "wrong": False} and result.faster == pytest.approx(2.0)
    assert "own choice is the fastest" in run._result(kernel, own, Found(), counts, launched).summary
    assert run._result(kernel, own, Found(), counts, launched[1:] + [took(64, 80, 1.0)]).reason == "nothing was timed"


def test_a_dry_run_whose_winner_is_wrong_ends_with_11(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_bucket, "made_up", lambda configs: {one: (1e-3 / one.rows,) for one in configs})
    words = ("tune", "rmsnorm", "--kernel", mine, "--case", "T=256,H=64,eps=1e-06", "--dry-run", "--json")
    status, found, _ = run_command((*words, "--out", str(tmp_path)))
    assert status == 11 and found["rows"][0]["status"] == "INCORRECT" and found["rows"][0]["best"]["wrong"]


def test_an_op_whose_cases_say_no_rows_takes_the_heuristic(tuning, tmp_path, monkeypatch):
    run, kernel = tuning
    free = replace(kernel, heuristic=lambda case, scheme=None: kernel.config_type(2))
    assert config_for(free, Case(length=3), SCHEMES["fp32"], torch.device("cpu")) == kernel.config_type(2)
    monkeypatch.setattr(tune, "rows_of", lambda case: None)
    with pytest.raises(ValueError, match="case: expected one of M, T, B to say its rows.*rmsnorm has T="):
        tune_op("rmsnorm", ["test_chunked"], out=tmp_path, device="cpu")

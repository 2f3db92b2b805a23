"""`rooflab lab`: one row for each op; a NOISY reading has a flag, is drawn pale, and is never divided or the best."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import typer
from test_history import record

from rooflab.bench import lab, show
from rooflab.bench.cli.app import exit_for
from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.engine.runs import EngineRun
from rooflab.bench.report.figures import bench_row
from rooflab.engine.metrics import LatencySummary
from rooflab.kernels import registry

BUSY = "other processes were running"


def times(clean, noisy):
    """Records of gemm at one case by kernel: clean times in ms, and noisy ones."""
    wanted = [(name, ms, {}) for name, ms in clean.items()]
    wanted += [(name, ms, {"status": "NOISY", "reason": BUSY}) for name, ms in noisy.items()]
    return [record(at, ms, kernel=name, case_id="M=64", **more) for at, (name, ms, more) in enumerate(wanted)]


def test_the_lab_shows_a_noisy_time_and_divides_by_none():
    (row,) = lab.best_of_each_op(times({"naive": 4.0, "packed": 2.0}, {"library": 1.0}))
    assert (row["best"], row["best_ms"], row["vs_naive"]) == ("packed", 2.0, "2.00x")
    assert (row["library_ms"], row["vs_library"]) == ("1.00 NOISY", None)
    (row,) = lab.best_of_each_op(times({}, {"naive": 4.0}))
    assert (row["best"], row["naive_ms"], row["vs_naive"]) == (None, "4.00 NOISY", None)


def wrong(asked, limit_s):
    """The results of checks that call every kernel wrong."""
    for place, (kernel, case, scheme, *_) in enumerate(asked):
        about = kernel.op, kernel.name, kernel.backend, case, scheme.name, "cpu", 0
        yield place, CheckResult(*about, "INCORRECT", "torch", reason="c: off")


def test_the_lab_shows_a_row_of_each_op_and_what_is_wrong_of_it(monkeypatch, tmp_path, capsys):
    names = {"arch": SimpleNamespace(name="tiny"), "device": torch.device("cpu"), "dtype_name": "fp32"}
    answer = EngineRun([{"text": "blue"}] * 2, LatencySummary(1, 9, 5, *[1.0] * 9), "")
    for name, stand_in in {
        "fetch": lambda: None,
        "LLM": lambda **of: SimpleNamespace(**names),
        "warm_up": lambda llm: None,
        "kernel_names": lambda llm: {},
        "as_prompt": lambda *of: None,
        "stream_one": lambda *of: answer,
        "run_batch": lambda *of: answer,
        "engine_record": lambda *of: replace(record(0, 1.0), run_id=of[-1]),
        "Checkers": lambda device: SimpleNamespace(device=device, start=len, each=wrong),
        "draw_records": lambda *of: [],
        "run_benches": lambda *of, **more: times({"naive": 4.0, "packed": 2.0}, {}),
    }.items():
        monkeypatch.setattr(lab, name, stand_in)
    monkeypatch.setattr(registry, "ops", lambda: {"gemm": registry.get_op("gemm")})
    summary = lab.run_lab(tmp_path, smoke=True)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["gemm", "4.00", "packed", "2.00", "50%", "0"] in shown
    assert summary["wrong"] == sum(line[-3:] == ["INCORRECT:", "c:", "off"] for line in shown) > 2
    assert summary["best"][0]["vs_naive"] == "2.00x" and (tmp_path / "summary.json").is_file()


def test_the_table_flags_it_once_and_the_command_ends_with_13(capsys):
    rows = [bench_row(one) for one in times({"naive": 4.0}, {"library": 1.0, "packed": 2.0})]
    show.bench_table(rows)
    out = " ".join(capsys.readouterr().out.split())
    assert "NOISY 1.00" in out and f"NOISY: gemm/library, gemm/packed: {BUSY}" in out
    with pytest.raises(typer.Exit) as ended:
        exit_for({"OK", "NOISY"})
    assert ended.value.exit_code == 13

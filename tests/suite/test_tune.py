"""Tuning: the search leaves out configs that cannot win, the winner was checked, and only clean records are written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from commands_in_process import run_command
from op_kernels import own_registry  # noqa: F401

from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.tune import bucket as tune_bucket
from rooflab.bench.tune.search import GROUP_SIZE, MAX_FINALISTS, SearchResult, least_s, search
from rooflab.bench.tune.tune import tune_op
from rooflab.kernels import registry
from rooflab.kernels.tuning import Footprint
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Cost, bound


@dataclass(frozen=True)
class Config:
    size: int


class Bench:
    """Stands for a device: times by a formula, one unit of its clock for each config timed."""

    def __init__(self, seconds, drift=1.0):
        self.seconds, self.drift = seconds, drift
        self.calls, self.now = [], 0.0

    def times(self, configs):
        self.calls.append(list(configs))
        self.now += len(configs)
        slow = self.drift ** len(self.calls)
        found = {config: self.seconds(config.size) for config in configs}
        return {one: value if isinstance(value, str) else (value * slow,) for one, value in found.items()}

    def search(self, own, sizes, least=lambda config: (0.0,), deadline=1e9):
        configs = [Config(size) for size in sizes]
        return search(Config(own), configs, least, self.times, deadline, lambda: self.now)


@pytest.mark.parametrize("drift", [1.0, 1.05])
def test_the_search_finds_the_fastest_and_scores_it_against_the_launchers_choice(drift):
    """Also on a card that slows down, which must not favour what was timed first."""
    bench = Bench(lambda size: 1e-3 * (1 + abs(size - 37) / 100), drift)
    found = bench.search(10, range(60))
    assert found.finalists(Config(10))[0] == Config(37) and len(found.finalists(Config(10))) == MAX_FINALISTS
    assert found.scores[Config(37)] == pytest.approx(1 / 1.27, rel=1e-6) and found.scores[Config(10)] == 1.0
    assert all(len(call) <= GROUP_SIZE + 1 for call in bench.calls)


def test_a_config_whose_bound_lies_above_the_best_time_is_not_timed():
    bench = Bench(lambda size: 1e-3)
    found = bench.search(0, range(30), least=lambda config: (2e-3 if config.size % 3 == 1 else 1e-6,))
    assert found.bounded == 10 and not any(config.size % 3 == 1 for call in bench.calls for config in call)


def test_what_is_far_slower_is_dropped_and_what_fails_is_said():
    bench = Bench(lambda size: "OutOfResources: shared memory" if size == 7 else 1e-3 * (9 if size > 7 else 1))
    found = bench.search(0, range(12))
    assert found.dropped == 4 and found.failures == {Config(7): "OutOfResources: shared memory"}
    assert {config.size for config in found.scores} == set(range(7))
    found = bench.search(7, range(5, 9))
    assert [*found.failures] == [Config(7)] and not found.scores, "the launcher's own choice failed"


def test_the_search_ends_in_time_and_counts_what_it_left():
    bench = Bench(lambda size: 1e-3)
    found = bench.search(0, range(100), deadline=22)
    assert bench.now <= 22 + GROUP_SIZE + 1 and found.left == 100 - len(found.scores) > 50


def test_the_search_walks_from_the_best_so_far():
    """Of 1,000 configs it times the few that lead from a corner to the other."""

    @dataclass(frozen=True)
    class Three:
        a: int
        b: int
        c: int

    def times(configs):
        timed.update(configs)
        return {one: (1e-3 * (1.0 + 0.02 * ((9 - one.a) + (9 - one.b) + (9 - one.c))),) for one in configs}

    timed = set()
    every = [Three(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    clock = iter(range(10**6))
    found = search(Three(0, 0, 0), every, lambda config: (0.0,), times, 20, lambda: next(clock))
    assert found.finalists(Three(0, 0, 0))[0] == Three(9, 9, 9) and len(timed) < 200


def test_the_bound_of_a_config_counts_padding_and_the_busiest_sm():
    card = get_device("h100")
    ceilings = card.ceilings(card.max_clock_hz)
    kernel = registry.get_kernel("gemm", "tensor_core")
    spec = registry.get_op("gemm")

    def of(M, **values):
        case = Case(M=M, N=4096, K=4096, layout="NT", bias=False)
        config = kernel.tuning.config_type(**{**asdict(kernel.tuning.heuristic(case)), **values})
        cost = spec.cost_of(spec.make_inputs(case, SCHEMES["bf16"], torch.device("meta"), 0))
        return least_s(cost, ceilings, kernel.tuning.footprint(config, case), card.sms), bound(cost, ceilings).seconds

    padded, floor = of(4096 + 129, block_m=128, block_n=128)
    snug, _ = of(4096 + 129, block_m=64, block_n=64)
    assert padded > snug > floor
    few, many = (of(M, block_m=128, block_n=128)[0] for M in (16, 128))
    assert few == pytest.approx(many, rel=1e-6), "112 of 128 rows are padding"
    # 4096^2 over tiles of 128 is 1024 CTAs: the busiest of 132 SMs runs 8, as if the GPU did 1056.
    even, floor = of(4096, block_m=128, block_n=128)
    assert even / floor == pytest.approx(8 * 132 / 1024, rel=1e-6)
    assert least_s(Cost(1e9, 0), ceilings, Footprint(128, 32, 0, 1), card.sms) == bound(Cost(1e9, 0), ceilings).seconds


def test_writes_that_may_still_lie_in_l2_prune_nothing():
    """Of an op that writes as much as it reads, half of the time that both take at HBM's rate is possible."""
    card = get_device("h100")
    ceilings = card.ceilings(card.max_clock_hz)
    cost = Cost(read_bytes=1e7, write_bytes=1e7)
    both, reads = bound(cost, ceilings).seconds, bound(Cost(1e7, 0.0), ceilings).seconds
    assert reads <= least_s(cost, ceilings, None, card.sms) < (both + reads) / 2


MINE = '''
from dataclasses import dataclass
import torch
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import Tuning
from rooflab.reference.spec import get_scheme

@dataclass(frozen=True)
class Config:
    rows: int
    """Rows normed at a time."""
    wrong: bool = False

def configs(case, scheme=get_scheme("bf16")):
    return tuple(Config(rows) for rows in (1, 2, 8, 64, 512)) + (Config(4096, wrong=True),)

def rmsnorm(x, weight, eps=1e-6, out=None, *, config=None):
    config = config or Config(1)
    out = torch.empty_like(x) if out is None else out
    for start in range(0, x.shape[0], config.rows):
        part = x[start : start + config.rows].float()
        scale = 1.0 if config.wrong else (part.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        out[start : start + config.rows] = (part * scale * weight.float()).to(x.dtype)
    return out

register(
    op="rmsnorm", name="test_chunked", role="optimized", backend="torch",
    tuning=Tuning(
        Config,
        configs,
        heuristic=lambda case, scheme=None: Config(1),
        rule=lambda config, case, scheme=None: config.rows <= 64 or config.rows <= case["T"] or config.wrong,
    ),
)(rmsnorm)
'''


@pytest.fixture
def mine(tmp_path, own_registry):  # noqa: F811
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


@pytest.mark.more
def test_a_kernel_is_tuned_for_real(mine, tmp_path):
    """One row at a time is tens of times slower than many at once, so that the search must leave its own choice."""
    report = tune_op("rmsnorm", [mine], cases=["T=256,H=64,eps=1e-06"], budget_s=30.0, device="cpu", out=tmp_path / "o")
    (result,) = report.results
    assert (result.kernel, result.bucket) == ("test_chunked", "rows:512")
    assert result.configs == 6 and result.illegal == 1, "512 rows do not fit 256"
    assert result.best is not None and result.best["rows"] in (8, 64) and result.best["wrong"] is False
    assert result.faster > 2 and not report.stopped
    found = record_files.read(tmp_path / "o")
    assert [record.to_json() for record in found] == [record.to_json() for record in report.records]
    own = [record for record in found if record.kernel == "test_chunked"]
    measured = {record.config["rows"] for record in own}
    assert 1 in measured and measured & {8, 64}, "the launcher's own choice beside what was found"
    for one in own:
        wrong = one.status == "INCORRECT" and one.latency_median_ms is None
        assert wrong if one.config["wrong"] else one.status in ("OK", "INVALID") and one.checked_by == "torch"
    assert any(record.kernel == "library" and record.latency_median_ms for record in found), "timed beside the library"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "rmsnorm", "budget_s": 0.0}, "budget: expected seconds above 0, got 0.0"),
        ({"op": "rmsnorm"}, "rmsnorm/cluster cannot be timed here: UNSUPPORTED: needs a CUDA device"),
        ({"op": "rmsnorm", "kernels": ["library"]}, "expected a tunable one, got rmsnorm/library"),
        ({"op": "embedding"}, "no kernel of embedding takes a config"),
        ({"op": "rmsnorm", "scheme": "fp64", "dry_run": True}, "scheme: expected one of fp32"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        tune_op(out=tmp_path, device="cpu", **arguments)


def test_a_kernel_that_broke_a_process_is_not_tuned(tmp_path, monkeypatch):
    excluded = tmp_path / "excluded.json"
    excluded.write_text('{"rmsnorm/cluster": "TIMEOUT"}')
    monkeypatch.setenv("ROOFLAB_EXCLUDE", str(excluded))
    report = tune_op("rmsnorm", cases=["T=256,H=64,eps=1e-06"], dry_run=True, out=tmp_path / "out")
    assert {result.kernel for result in report.results} == {"fused"}


@pytest.fixture
def tuning(mine, tmp_path):
    """A tuning run of a kernel whose own choice is 1 row for up to 100 rows, and 8 for more."""
    kernel = registry.load_file(Path(mine))[0]
    choose = lambda case, scheme=None: kernel.tuning.config_type(1 if case["T"] <= 100 else 8)
    kernel = replace(kernel, tuning=replace(kernel.tuning, heuristic=choose))
    spec = registry.get_op("rmsnorm")
    run = tune_bucket.TuningRun(spec, [kernel], [], SCHEMES["fp32"], torch.device("cpu"), RunWriter(tmp_path, "r"))
    return run, kernel


def took(kernel, tokens, latency_ms):
    case = Case(T=tokens, H=64, eps=1e-6)
    return Record(
        kind="bench",
        run_id="r",
        status="OK",
        environment={},
        op="rmsnorm",
        kernel=kernel,
        backend="torch",
        case_id=case.id,
        case=dict(case),
        basis="measured",
        device="cpu",
        checked_by="torch",
        latency_median_ms=latency_ms,
    )


def test_the_launchers_choice_may_differ_within_a_bucket(tuning, monkeypatch):
    run, kernel = tuning
    best = SearchResult(scores={kernel.tuning.config_type(64): 0.5})
    monkeypatch.setattr(tune_bucket, "search", lambda *of: best)

    def result(*records):
        monkeypatch.setattr(tune_bucket.Measurement, "records", lambda *of: records)
        run.bucket("rows:512", [Case(T=tokens, H=64, eps=1e-6) for tokens in (80, 400)], 0.0)
        return run.results[-1]

    launched = [took("test_chunked", 80, 2.0), took("test_chunked", 400, 2.0)]
    found = result(*launched, took("test_chunked#0", 80, 1.0), took("test_chunked#0", 400, 1.0))
    assert found.best == {"rows": 64, "wrong": False} and found.faster == pytest.approx(2.0)
    assert [record.config["rows"] for record in run.records] == [1, 8, 64, 64]
    assert "own choice is the fastest" in result(*launched).summary
    assert result(launched[1], took("test_chunked#0", 80, 1.0)).reason == "nothing was timed"


def test_a_dry_run_whose_winner_is_wrong_ends_with_11_and_publishes_nothing(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_bucket, "made_up", lambda configs: {one: (1e-3 / one.rows,) for one in configs})
    words = ("tune", "rmsnorm", "--kernel", mine, "--case", "T=256,H=64,eps=1e-06", "--dry-run", "--json")
    status, found, _ = run_command((*words, "--out", str(tmp_path / "out")))
    assert status == 11 and found["rows"][0]["status"] == "INCORRECT" and found["rows"][0]["best"]["wrong"]
    assert not [*(tmp_path / "out").glob("*")]

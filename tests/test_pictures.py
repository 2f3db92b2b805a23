"""What the documentation's pictures are drawn from: bytes by level, and schedules planned and timed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from commands_in_process import run_command
from matplotlib.text import Text
from torch.profiler import profile

from rooflab.bench.core import record_files
from rooflab.bench.core.environment import Environment
from rooflab.bench.emulate import calls as emulated_calls
from rooflab.bench.report.pictures import figures, schedule
from rooflab.bench.report.pictures.figures import draw_levels, panels_of
from rooflab.bench.report.pictures.levels import Moved, bytes_of, levels, move
from rooflab.bench.report.pictures.schedule import planned
from rooflab.kernels import tuning
from rooflab.kernels.flash_attention import _timeline, tma
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.kernels.traffic import calls_of
from rooflab.reference.spec import Case, get_scheme

OP = "flash_attention"
BF16 = get_scheme("bf16")
SMALL = "B=1,T=300,S=300,H=2,H_kv=1,D=64,causal=true"
ORDERS = ("tma", "persistent", "ping_pong")


def case(text):
    return get_op(OP).check_case(Case.parse(text))


def given(name, text, device="meta"):
    kernel = get_kernel(OP, name)
    inputs = get_op(OP).make_inputs(case(text), BF16, torch.device(device), 0)
    return kernel, {key: value for key, value in inputs.items() if key in kernel.accepted}


@pytest.fixture(scope="module", autouse=True)
def emulated():
    """Answers of the emulator by kernel and case: each is asked for once."""
    kept, call = {}, emulated_calls.call

    def once(target, *arguments, **settings):
        if (target.kernel, target.case) not in kept:
            kept[target.kernel, target.case] = call(target, *arguments, **settings)
        return kept[target.kernel, target.case]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_calls, "call", once)
        yield once


def launch_of(name, text):
    (target,) = emulated_calls.choose(OP, [name], [text], ["bf16"], None)
    (launch,) = emulated_calls.call(target, races=False).answer["launches"]
    return launch


@pytest.fixture(scope="module")
def moved(emulated):
    return move(OP, ["naive", *ORDERS], SMALL)


def bytes_in(run: Callable[[], object]) -> list[Moved]:
    return [bytes_of(call) for call in calls_of(run)]


def test_torchs_calls_move_their_operands():
    x, y = torch.empty(64, 32, device="meta"), torch.empty(32, device="meta")
    add, product, fill, copy = bytes_in(
        lambda: (x + y, x @ x.mT, x.zero_(), x.copy_(y), x.view(-1), torch.empty_like(x), x.mT)
    )
    assert (add.hbm_read, add.asked_read, add.hbm_write) == (4 * (64 * 32 + 32), 8 * 64 * 32, 8192)
    assert product.modelled and (product.hbm_read, product.asked_read, product.hbm_write) == (16384, 16384, 16384)
    assert (fill.hbm_read, fill.hbm_write) == (0, 8192) and (copy.hbm_read, copy.hbm_write) == (128, 8192)
    large = torch.empty(3, 256, 64, device="meta", dtype=torch.bfloat16)
    (product,) = bytes_in(lambda: large @ large.mT)
    assert product.asked_read == 2 * 2 * large.nbytes, "two tiles each way read every row and column twice"
    repeated = torch.empty(8, 1, device="meta").expand(8, 100)
    (clone,) = bytes_in(lambda: repeated.clone())
    assert (clone.hbm_read, clone.asked_read, clone.hbm_write) == (32, 3200, 3200)


def test_the_calls_within_logsumexp_are_torchs_own():
    kernel, inputs = given("naive", SMALL)
    names = [call.name for call in calls_of(lambda: kernel.fn(**inputs))]
    first = names.index("amax")
    ours = names[first : names.index("add_") + 1]
    with profile() as seen:
        torch.logsumexp(torch.randn(2, 3, 4), dim=-1)
    kinds = [event.name.removeprefix("aten::") for event in seen.events()]
    kinds = kinds[kinds.index("amax") : kinds.index("add_") + 1]
    kinds = [name for name in kinds if name in set(ours)]
    kinds = [name for name, before in zip(kinds, ["", *kinds], strict=False) if name != before]  # abs calls its out=
    assert ours == kinds and len(ours) == 9


def test_the_naive_scores_cross_memory_as_often_as_its_calls_say():
    """16 times under a causal mask: products 2, scale 2, mask 2, log-sum-exp 6, weights 4; all else is far smaller."""
    T, H = 1024, 4
    kernel, inputs = given("naive", f"B=1,T={T},S={T},H={H},H_kv=1,D=64,causal=true")
    scores = 4 * H * T * T
    calls = bytes_in(lambda: kernel.fn(**inputs))
    assert sum(call.hbm_read // scores + call.hbm_write // scores for call in calls) == 16


@pytest.mark.more
def test_levels_are_the_emulators_totals(moved):
    naive, *compiled = moved
    least = get_op(OP).cost_of(get_op(OP).make_inputs(case(SMALL), BF16, torch.device("meta"), 0)).bytes
    for record in compiled:
        launch = launch_of(record.kernel, SMALL)
        counted = launch["bytes"]
        assert record.metrics["moved_hbm_read_bytes"] == counted["hbm_read"]
        assert record.metrics["moved_l2_read_bytes"] == counted["global_read"] + counted["copy_read"]
        into = counted["shared_write"] + counted["tma_load"]
        out = counted["shared_read"] + counted["shared_matrix"] + counted["tma_store"]
        assert (record.metrics["moved_shared_write_bytes"], record.metrics["moved_shared_read_bytes"]) == (into, out)
        assert record.metrics["moved_shared_wavefronts"] == launch["shared_wavefronts"] > 0
        assert record.traffic_bytes == least == record.least_bytes and record.checked_by == "emulator"
    assert naive.traffic_bytes > 10 * least and naive.traffic_basis == "modelled"
    assert levels([dict.fromkeys(counted, 1)])["moved_l2_write_bytes"] == 3


@pytest.mark.more
def test_the_figure_of_levels_says_what_it_has(moved, tmp_path):
    hbm, l2, shared, turns = panels_of(moved)
    assert [len(panel.texts) for panel in (hbm, l2, shared, turns)] == [4] * 4
    assert shared.texts[0].startswith("not seen") and not any(values[0] for values in shared.parts.values())
    assert l2.parts["read, modelled"][0] > 0 and not any(l2.parts["read, modelled"][1:])
    for panel, level in ((hbm, "hbm"), (l2, "l2"), (shared, "shared")):
        for place, record in list(enumerate(moved))[1:]:
            both = sum(record.metrics[f"moved_{level}_{way}_bytes"] for way in ("read", "write"))
            assert sum(values[place] for values in panel.parts.values()) == pytest.approx(both / 1e6)
    conflicts = {**moved[1].metrics, "moved_shared_wavefronts": 3e3, "moved_shared_wavefronts_least": 2e3}
    *_, turns = panels_of([dataclasses.replace(moved[1], metrics=conflicts)])
    assert turns.texts == ["3 thousand, 1 of them lost to bank conflicts"] and list(turns.parts.values()) == [[2], [1]]
    assert draw_levels(moved, tmp_path).read_bytes().startswith(b"\x89PNG")
    first = draw_levels(moved, tmp_path / "again").read_bytes()
    assert first == draw_levels(moved, tmp_path).read_bytes(), "it changes only with its numbers"
    with pytest.raises(ValueError, match="expected those of one op, case and scheme, got 0"):
        draw_levels([], tmp_path)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("shape", ["B=2,T=1000,S=1000,H=6,H_kv=2,D=128", "B=1,T=200,S=900,H=4,H_kv=1,D=64"])
def test_every_tile_is_planned_once_and_no_place_has_two_at_once(name, shape):
    for one in (case(f"{shape},causal={causal}") for causal in ("true", "false")):
        found = planned(name, one, BF16, sms=7)
        B, T, H = (int(one[key]) for key in ("B", "T", "H"))
        every = [(m, h) for m in range(-(-T // 128)) for h in range(B * H)]
        assert sorted((tile.row, tile.head) for tile in found.tiles) == every
        assert all(0 <= tile.lane < 7 * found.ctas_per_sm for tile in found.tiles)
        for lane in {tile.lane for tile in found.tiles}:
            own = sorted((tile for tile in found.tiles if tile.lane == lane), key=lambda tile: tile.start)
            assert own[0].start == 0 and all(a.end == b.start for a, b in zip(own, own[1:], strict=False))
        assert found.span >= found.mean and found.imbalance >= 1
        assert sum(tile.work for tile in found.tiles) == pytest.approx(found.mean * 7 * found.ctas_per_sm)


@pytest.mark.more
def test_planned_work_is_the_emulators_and_balanced_where_made_for_a_causal_mask():
    """Each block of scores is two products."""
    for text, names in (
        *((SMALL, ORDERS), (SMALL.replace("true", "false"), ORDERS[:1]), (SMALL + ",window=100", ORDERS[1:2])),
    ):
        for name in names:
            blocks = sum(tile.work for tile in planned(name, case(text), BF16).tiles)
            flops = {"bf16": 2 * 2 * 64 * schedule.BLOCK**2 * blocks}
            assert launch_of(name, text)["tensor_flops"] == flops, (name, text)
    text = "B=1,T=4096,S=4096,H=32,H_kv=8,D=128,causal=true"
    grid, persistent, ping_pong = (planned(name, case(text), BF16).imbalance for name in ORDERS)
    assert grid > 1.1 and persistent < 1.01 and ping_pong < 1.01


PROGRAM = """
import json, sys, torch
from rooflab.bench.emulate.ours import every_launch
from rooflab.bench.emulator import Launches
from rooflab.kernels.flash_attention import _timeline, persistent, ping_pong, tma
from rooflab.reference.spec import Case, get_scheme
from rooflab.kernels.registry import get_op

case = get_op("flash_attention").check_case(Case.parse(sys.argv[1]))
inputs = get_op("flash_attention").make_inputs(case, get_scheme("bf16"), torch.device("cpu"), 0)
found = {}
for call in (tma.tma, persistent.persistent, ping_pong.ping_pong):
    launches = Launches()
    with every_launch(launches):
        plain = call(**inputs)
        timeline = torch.full((2, 3), -1)
        with _timeline.kept_in(timeline):
            kept = call(**inputs)
    clocks = [sum(n for opcode, n in result.instructions.items() if opcode == "mov.u64") for result in launches.results]
    found[call.__name__] = {"same": torch.equal(plain, kept), "races": launches.races, "rows": timeline.tolist(),
                   "clocks": clocks}
print(json.dumps(found))
"""


@pytest.mark.slow  # 28 s
def test_kernels_keep_when_and_where_their_tiles_ran():
    """Emulated: the clock counts the emulator's steps, so that only the order means something."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    text = "B=1,T=200,S=200,H=1,H_kv=1,D=64,causal=true"
    command = [sys.executable, "-c", PROGRAM, text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, found in json.loads(done.stdout).items():
        assert found["same"] and not found["races"], name
        assert found["clocks"][0] == 0 < found["clocks"][1], "a launch without a timeline reads no clock"
        assert all(sm >= 0 and 0 <= began < ended for sm, began, ended in found["rows"]), name
        first, second = (ended - began for _, began, ended in found["rows"])
        assert first < second, "the later row sees more keys"
        assert len({row[0] for row in found["rows"]}) == 2, "two tiles are on two SMs"


@pytest.fixture
def timed(monkeypatch):
    """`timed(rows)`: the schedule of a launch on 4 SMs that writes these rows; it notes the launches in `kept`."""
    kept, written = [], []

    def launch(*, config, **inputs):
        timeline = _timeline.TIMELINE.get()
        kept.append((config, len(timeline)))
        timeline[: len(written)] = torch.tensor(written)

    def timed(rows):
        written[:] = rows
        return schedule.timed("tma", case(SMALL), BF16, torch.device("cpu"))

    launch.__wrapped__ = tma.tma  # whose signature it has
    monkeypatch.setattr(schedule, "get_kernel", lambda *name: dataclasses.replace(get_kernel(*name), fn=launch))
    monkeypatch.setattr(schedule, "sm_count", lambda device: 4)
    timed.kept = kept
    return timed


def test_a_timeline_has_a_row_for_each_tile_of_the_config_that_this_card_takes(monkeypatch, timed):
    """A record's choice of 64 rows makes 5 tiles of a head where the heuristic's 128 make 3."""
    tuned = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(tuning, "tuned", lambda *where: tuned)
    found = timed([[number, 0, 1] for number in range(10)])
    assert timed.kept == [(tma.Config(**tuned), 10)] and {tile.row for tile in found.tiles} == set(range(5))
    with pytest.raises(ValueError, match="case: flash_attention/tma: "):
        schedule.timed("tma", case(SMALL), get_scheme("fp8_e4m3"), torch.device("cpu"))


def test_a_timeline_is_read_back_with_places_for_ctas_that_share_an_sm(timed):
    rows = [[0, 1000, 3000], [0, 2000, 4000], [1, 1000, 2000], [0, 3000, 5000], [3, 1500, 2500], [1, 2000, 9000]]
    found = timed(rows)
    assert found.ctas_per_sm == 2 and found.unit == "us" and found.span == 8.0
    assert {(tile.row, tile.head): tile.lane for tile in found.tiles} == {
        (0, 0): 0, (1, 0): 1, (2, 0): 2, (0, 1): 0, (1, 1): 6, (2, 1): 2
    }  # fmt: skip
    assert found.mean == (2 + 2 + 1 + 2 + 1 + 7) / 8
    with pytest.raises(ValueError, match="expected every tile to have run, got none of 1, first 5"):
        timed(rows[:-1])
    rows = [[0, 2000, 3000], [0, 2000, 2000], [0, 1000, 2000], [1, 1000, 2000], [2, 1000, 2000], [3, 1000, 2000]]
    assert timed(rows).ctas_per_sm == 1, "shorter than a step of the timer is no second place"


def test_schedules_of_both_kinds_are_drawn(tmp_path, timed):
    rows = [[number % 4, 1000 * number, 1000 * number + 900] for number in range(6)]
    kept = timed(rows)
    plan = planned("ping_pong", case(SMALL), BF16, 4)
    environment = Environment.now()
    for found in ([plan], [kept], [kept, plan]):
        path = figures.draw_schedules(found, case(SMALL), BF16, environment, tmp_path)
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected at least one"):
        figures.draw_schedules([], case(SMALL), BF16, environment, tmp_path)


@pytest.mark.more
def test_the_commands_write_pictures_and_their_numbers(tmp_path):
    words = ("--case", SMALL, "--out", str(tmp_path), "--json")
    kernels = ("--kernel", "tma", "--kernel", "persistent")
    status, value, errors = run_command(("picture", "schedule", OP, *kernels, *words))
    assert status == 0, errors
    kept = json.loads((tmp_path / "schedule-flash_attention.json").read_text())
    assert [row["kernel"] for row in value["kernels"]] == [row["kernel"] for row in kept["schedules"]]
    assert value["kernels"][0]["basis"] == "schedule" and (tmp_path / "schedule-flash_attention.png").is_file()
    status, value, errors = run_command(("picture", "bytes", OP, "--kernel", "naive", "--kernel", "tma", *words))
    assert status == 0, errors
    records = record_files.read(tmp_path)
    assert [record.kernel for record in records] == ["naive", "tma"]
    assert (tmp_path / "bytes-flash_attention.png").is_file()
    assert value["kernels"][1]["moved_hbm_read_bytes"] == records[1].metrics["moved_hbm_read_bytes"]
    for bad, message in [
        (("schedule", "gemm", "--kernel", "tma"), "op: expected flash_attention"),
        (("schedule", OP, "--kernel", "online"), "kernel: expected one of tma, persistent, ping_pong, got 'online'"),
        (("bytes", OP, "--kernel", "library"), "kernel: expected a naive one"),
    ]:
        status, _, errors = run_command(("picture", *bad, *words))
        assert status == 2 and message in " ".join(errors.split()), errors


def test_the_powers_of_ten_of_an_axis_are_drawn_as_powers(tmp_path):
    figure = figures.new_figure(4, 3)
    figure.subplots().loglog([1, 1000], [1, 1000])
    figures.save(figure, tmp_path / "x.png")
    powers = [text for text in figure.findobj(Text) if "mathdefault" in text.get_text()]
    assert powers and all(text.get_parse_math() for text in powers)

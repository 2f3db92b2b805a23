"""What the documentation's pictures are drawn from: bytes by level, and schedules."""

from __future__ import annotations

import dataclasses
import json
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


def test_schedules_are_drawn(tmp_path):
    environment, found = Environment.now(), [planned(name, case(SMALL), BF16, 4) for name in ORDERS]
    path = figures.draw_schedules(found, case(SMALL), BF16, environment, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="case: flash_attention/tma: "):
        planned("tma", case(SMALL), get_scheme("fp8_e4m3"))
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

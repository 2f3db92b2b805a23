"""The data behind the documentation's pictures: bytes by level, and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from rooflab.bench.core.environment import Environment
from rooflab.bench.emulate import calls as emulated_calls
from rooflab.bench.report.pictures import canvas, tile_schedule
from rooflab.bench.report.pictures.canvas import draw_levels
from rooflab.bench.report.pictures.levels import bytes_of, move
from rooflab.bench.report.pictures.tile_schedule import planned
from rooflab.kernels.registry import get_op
from rooflab.kernels.traffic import calls_of
from rooflab.reference.spec import Case, get_scheme

OP = "flash_attention"
BF16 = get_scheme("bf16")
SMALL = "B=1,T=300,S=300,H=2,H_kv=1,D=64,causal=true"
ORDERS = ("tma", "persistent", "ping_pong")


def case(text):
    return get_op(OP).check_case(Case.parse(text))


def launch_of(name, text):
    """What the emulator counts of a kernel's only launch."""
    (target,) = emulated_calls.choose(OP, [name], [text], ["bf16"], None)
    (launch,) = emulated_calls.call(target, races=False).answer["launches"]
    return launch


def bytes_in(run: Callable[[], object]) -> list[list[int]]:
    """Of each call what it reads of HBM and asks of L2, what it writes to HBM, and what of it is modelled."""
    names = ("hbm_read", "l2_read", "hbm_write", "l2_modelled")
    return [[bytes_of(call)[f"{name}_bytes"] for name in names] for call in calls_of(run)]


def test_torchs_calls_move_their_operands():
    x, y = torch.empty(64, 32, device="meta"), torch.empty(32, device="meta")
    add, product, fill, copy = bytes_in(
        lambda: (x + y, x @ x.mT, x.zero_(), x.copy_(y), x.view(-1), torch.empty_like(x), x.mT)
    )
    assert add == [4 * (64 * 32 + 32), 8 * 64 * 32, 8192, 0] and product == [16384] * 4
    assert fill == [0, 0, 8192, 0] and copy[::2] == [128, 8192]
    large = torch.empty(3, 256, 64, device="meta", dtype=torch.bfloat16)
    (product,) = bytes_in(lambda: large @ large.mT)
    assert product[1] == 2 * 2 * large.nbytes, "two tiles each way read every row and column twice"
    repeated = torch.empty(8, 1, device="meta").expand(8, 100)
    (clone,) = bytes_in(lambda: repeated.clone())
    assert clone == [32, 3200, 3200, 0]


def test_a_naive_kernel_has_the_bytes_of_its_calls_and_the_libraries_have_none():
    (naive,) = move(OP, ["naive"], SMALL)
    least = get_op(OP).cost_of(get_op(OP).make_inputs(case(SMALL), BF16, torch.device("meta"), 0)).bytes
    assert naive.least_bytes == least and naive.traffic_bytes > 10 * least and naive.traffic_basis == "modelled"
    with pytest.raises(ValueError, match="^kernel: "):
        move(OP, ["library"], SMALL)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("shape", ["B=2,T=1000,S=1000,H=6,H_kv=2,D=128", "B=1,T=200,S=900,H=4,H_kv=1,D=64"])
def test_every_tile_is_planned_once_and_no_place_has_two_at_once(name, shape):
    for one in (case(f"{shape},causal={causal}") for causal in ("true", "false")):
        found = planned(name, one, BF16, sms=7)
        B, T, H = (int(one[key]) for key in ("B", "T", "H"))
        every = [(m, h) for m in range(-(-T // 128)) for h in range(B * H)]
        assert sorted((tile.row, tile.head) for tile in found.tiles) == every
        for lane in {tile.lane for tile in found.tiles}:
            own = sorted((tile for tile in found.tiles if tile.lane == lane), key=lambda tile: tile.start)
            assert 0 <= lane < 7 * found.ctas_per_sm and own[0].start == 0
            assert all(a.end == b.start for a, b in itertools.pairwise(own))
        assert found.span >= found.mean and found.imbalance >= 1
        assert sum(tile.work for tile in found.tiles) == pytest.approx(found.mean * 7 * found.ctas_per_sm)


@pytest.mark.more
@pytest.mark.parametrize("name", ORDERS)
def test_planned_work_and_levels_are_the_emulators(name, tmp_path):
    """Each block of scores is two products."""
    launch, (moved,) = launch_of(name, SMALL), move(OP, [name], SMALL)
    blocks = sum(tile.work for tile in planned(name, case(SMALL), BF16).tiles)
    assert launch["tensor_flops"] == {"bf16": 2 * 2 * 64 * tile_schedule.BLOCK**2 * blocks}
    counted = launch["bytes"]
    found = {name.removeprefix("moved_"): value for name, value in moved.metrics.items()}
    assert found["hbm_read_bytes"] == counted["hbm_read"] and moved.traffic_bytes == moved.least_bytes
    assert found["l2_read_bytes"] == counted["global_read"] + counted["copy_read"]
    assert found["shared_read_bytes"] == sum(counted[one] for one in ("shared_read", "shared_matrix", "tma_store"))
    assert draw_levels([moved], tmp_path).read_bytes().startswith(b"\x89PNG")


def test_work_is_balanced_where_made_for_a_causal_mask_and_drawn(tmp_path):
    large = case("B=1,T=4096,S=4096,H=32,H_kv=8,D=128,causal=true")
    found = [planned(name, large, BF16) for name in ORDERS]
    assert found[0].imbalance > 1.1 and max(one.imbalance for one in found[1:]) < 1.01
    environment, small = Environment.now(), [planned(name, case(SMALL), BF16, 4) for name in ORDERS]
    path = canvas.draw_schedules(small, case(SMALL), BF16, environment, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="case: flash_attention/tma: "):
        planned("tma", case(SMALL), get_scheme("fp8_e4m3"))

"""The data behind the documentation's picture of bytes by level."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rooflab.bench.emulate import calls as emulated_calls
from rooflab.bench.report.pictures.canvas import draw_levels
from rooflab.bench.report.pictures.levels import bytes_of, move
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.kernels.traffic import calls_of
from rooflab.reference.spec import Case, get_scheme

OP = "flash_attention"
BF16 = get_scheme("bf16")
SMALL = "B=1,T=300,S=300,H=2,H_kv=1,D=64,causal=true"


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


@pytest.mark.more
@pytest.mark.parametrize("name", ["tma", "persistent", "ping_pong"])
def test_levels_are_the_emulators(name, tmp_path):
    launch, (moved,) = launch_of(name, SMALL), move(OP, [name], SMALL)
    config = get_kernel(OP, name).config_for(case(SMALL), BF16, torch.device("meta"))
    rows, columns = config.block_m, config.block_n
    keys = [min(300, last) for last in range(rows, 300 + rows, rows)]  # that the last query of each tile may see
    scores = 2 * sum(rows * columns * -(-most // columns) for most in keys)  # of two heads, in whole blocks
    assert launch["tensor_flops"] == {"bf16": 2 * 2 * 64 * scores}, "two products a score"
    counted = launch["bytes"]
    found = {name.removeprefix("moved_"): value for name, value in moved.metrics.items()}
    assert found["hbm_read_bytes"] == counted["hbm_read"] and moved.traffic_bytes == moved.least_bytes
    assert found["l2_read_bytes"] == counted["global_read"] + counted["copy_read"]
    assert found["shared_read_bytes"] == sum(counted[one] for one in ("shared_read", "shared_matrix", "tma_store"))
    assert draw_levels([moved], tmp_path).read_bytes().startswith(b"\x89PNG")

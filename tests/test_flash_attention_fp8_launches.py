"""flash_attention/fp8: which config a launch takes, the order of its programs, and what its compiled code needs."""

from __future__ import annotations

import math

import pytest
import torch

from rooflab.bench.compile.static import CompileFailure, Request, compile_kernels
from rooflab.bench.emulate.calls import call
from rooflab.bench.predict.cases import Target
from rooflab.kernels import configs
from rooflab.kernels.configs import legal_configs
from rooflab.kernels.flash_attention import fp8
from rooflab.kernels.registry import get_kernel
from rooflab.kernels.tuning import SHARED_BYTES_PER_CTA
from rooflab.reference.flash_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case, Inputs

FP8 = SCHEMES["fp8_e4m3"]
RUNG = get_kernel("flash_attention", "fp8")


def _inputs(length: int, D: int, **more: bool) -> Inputs:
    case = Case(B=1, T=length, S=length, H=4, H_kv=2, D=D, causal=True, **more)
    return SPEC.make_inputs(case, FP8, torch.device("cpu"), 0)


class Launches:
    """In the kernel's place: what launches were given, of which `grid` programs run, if any."""

    def __init__(self, grid: int = 0):
        self.options: list[dict] = []
        self._grid, self._kernel = grid, fp8._attention

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.options.append(options)
            if self._grid:
                self._kernel[(self._grid,)](*args, **options)

        return launch


@pytest.mark.parametrize(("columns", "keys"), [(True, 256), (False, 128)])
def test_a_card_s_choice_is_taken_where_the_stored_values_leave_it_room(columns, keys, monkeypatch):
    """256 keys a step fit an SM of values in columns and not of values in rows, which fp16 makes twice as wide."""
    launches = Launches()
    monkeypatch.setattr(fp8, "_attention", launches)
    monkeypatch.setattr(configs, "card", lambda device: "a card")
    chosen = {"block_m": 64, "block_n": 256, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(configs, "tuned", lambda *key: chosen)
    configs.default_config.cache_clear()
    fp8.flash_attention(**_inputs(40, 128, v_columns=columns))
    configs.default_config.cache_clear()
    assert [options["BLOCK_N"] for options in launches.options] == [keys]


def test_a_head_s_longest_tile_comes_first(monkeypatch):
    monkeypatch.setattr(fp8, "_attention", Launches(grid=1))
    out = torch.full((1, 130, 4, 64), math.nan, dtype=torch.bfloat16)
    fp8.flash_attention(**_inputs(130, 64), out=out, config=fp8.Config(64, 64, num_warps=4, num_stages=2))
    assert out[0, 128:, 0].isfinite().all() and out[0, :128].isnan().all() and out[0, :, 1:].isnan().all()


def test_values_in_columns_meet_no_bank_conflict_and_those_in_rows_few():
    """128 keys of a head of 128: in rows and in e4m3, stored a byte at a time, they would take 4224 turns."""
    turns = {}
    for columns in (False, True):
        case = Case(B=1, T=64, S=256, H=1, H_kv=1, D=128, causal=False, **({"v_columns": True} if columns else {}))
        answer = call(Target("flash_attention", "fp8", case, FP8, None, fp8.Config(64, 128, 4, 2))).answer
        assert answer["status"] == "OK", answer["reason"]
        (launch,) = answer["launches"]
        turns[columns] = launch["shared_wavefronts"], launch["shared_wavefronts_least"]
    assert turns[True][0] == turns[True][1]
    assert turns[False][0] - turns[True][0] == 2 * 640


def test_footprints_are_those_of_the_compiled_code_and_nothing_spills_in_a_loop():
    requests = []
    for D in (64, 128, 256):
        for columns in (False, True):
            case = Case(B=1, T=2048, S=2048, H=8, H_kv=2, D=D, causal=True, **({"v_columns": True} if columns else {}))
            best = RUNG.tuning.heuristic(case, FP8)
            others = [fp8.Config(128, 64, 4, 2)] if (D, columns) == (64, False) else []
            others = [fp8.Config(128, 128, 8, 3)] if (D, columns) == (128, True) else others
            assert best in legal_configs(RUNG, case, FP8)
            requests += [Request("flash_attention", "fp8", case, FP8, config=config) for config in (best, *others)]
    for request, found in zip(requests, compile_kernels(requests), strict=True):
        assert not isinstance(found, CompileFailure), f"{request}: {found}"
        (info,) = found
        size = RUNG.tuning.footprint(request.config, request.case, FP8)
        assert info.threads == size.threads and size.registers <= info.registers and size.ctas == info.grid[0]
        assert size.shared_bytes <= info.shared_bytes <= size.shared_bytes + 1024 <= SHARED_BYTES_PER_CTA
        loops = [body for body in info.loops if body.innermost and body.counts["wgmma"]]
        assert loops and not any(body.counts["spill_load"] + body.counts["spill_store"] for body in loops)

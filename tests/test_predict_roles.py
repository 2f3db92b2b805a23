"""How the predictor divides a kernel: among its warps, between its launches, and by how often its code runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_predict import CHIP, H100, compiled, sass

from rooflab.bench.predict import model
from rooflab.bench.predict.model import predict
from rooflab.bench.predict.roles import Role, roles_of
from rooflab.bench.predict.sass import parse
from rooflab.bench.predict.work import Share, Work, work_of
from rooflab.roofline.model import Cost, Traffic

WGMMA = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
FLOPS = 2 * 64 * 256 * 16
WAIT, TMA = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "UTMALDG.2D [UR12], [UR10]"
TOLD = ("MOV R6, 0x800", "SYNCS.ARRIVE.TRANS64 RZ, [UR5+0x30000], R6")
EPILOGUE = (*[f"F2FP.BF16.F32.PACK_AB R{at}, R{at + 1}, R{at}" for at in range(24, 152, 2)], "STG.E.128 [R2.64], R24")


def program(*lines: str) -> str:
    """SASS with labels: `loop:` before a line and `BRA loop` after it."""
    places, rest = {}, []
    for line in lines:
        if line.endswith(":"):
            places[line[:-1]] = 16 * len(rest)
        else:
            rest.append(line)
    for name, address in places.items():
        rest = [line.replace(f"BRA {name}", f"BRA {address:#x}") for line in rest]
    return sass(*rest)


def families(body) -> list[str]:
    return [entry.family for entry in body]


def divided(text: str, threads: int = 128) -> list[Role]:
    return roles_of(parse(text), threads, {})


def worked(text: str, share: Share, **changes) -> Work:
    return work_of(replace(compiled("EXIT", **changes), sass=text), H100, CHIP, share)


def flattened() -> str:
    """A loop over the steps of all tiles; a branch steps over the epilogue in most turns, and a poll is out of line."""
    return program(
        *("S2R R0, SR_CTAID.X", "loop:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR11], R6", "@!P0 BRA poll", "back:"),
        *(WGMMA, WAIT, *TOLD, TMA, "@P1 BRA next", *EPILOGUE, "next:", "UIADD3 UR4, UR4, 0x1, URZ", "@P2 BRA loop"),
        *("EXIT", "poll:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR11], R6", "@!P0 BRA poll", "BRA back"),
    )


def specialised(consumers: int = 2) -> str:
    """A warp that loads and warpgroups that multiply, each in a loop over tiles around one over K."""
    lines = ["@!P0 BRA role0", "wait:", "USETMAXREG.DEALLOC.CTAPOOL 0x18", "BAR.SYNC 0x1", "@P3 BRA producer"]
    for at in range(1, consumers):
        lines += consumer(at)
    lines += ["producer:", "USETMAXREG.DEALLOC.CTAPOOL 0x18", "tiles:", "MUFU.RCP R0, R0", "fill:", *TOLD, TMA]
    lines += ["@P1 BRA fill", "@P2 BRA tiles", "BRA wait", *consumer(0)]
    return program(*lines, "EXIT")


def consumer(at: int) -> list[str]:
    barrier = f"BAR.SYNC.DEFER_BLOCKING {at + 2:#x}, 0x80"
    return [
        *(f"role{at}:", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", f"tile{at}:", "MUFU.RCP R0, R0"),
        *(f"k{at}:", barrier, WGMMA, WAIT, f"@P1 BRA k{at}", *EPILOGUE, f"@P2 BRA tile{at}"),
        *(["BRA wait"] if at else []),
    ]


def test_a_loop_is_divided_from_what_is_around_it_and_polls_are_no_loops():
    outer = ("outer:", "MOV R1, R2", "inner:", "LDG.E R4, [R2.64]", "@P0 BRA inner", "FADD R1, R1, R4", "@P1 BRA outer")
    (role,) = divided(program(*outer, "MOV R5, R1", "EXIT", "trap:", "BRA trap"))
    assert [families(body) for body in role.loops] == [["LDG", "BRA"]]
    assert families(role.rounds) == ["MOV", "FADD", "BRA"] and families(role.once)[:2] == ["MOV", "EXIT"]
    (role,) = divided(flattened())
    assert "SYNCS" in families(role.loops[0]) and len(role.loops) == 1
    assert role.multiplies and role.warps == 4


def test_what_a_turn_steps_over_runs_once_a_tile():
    (role,) = divided(flattened())
    assert "F2FP" not in families(role.loops[0]) and families(role.rounds)[: len(EPILOGUE)] == families_of(EPILOGUE)
    copying = program("loop:", "@P0 BRA skip", "LDGSTS.E.128 [R9], [R6.64]", "skip:", WGMMA, "@P1 BRA loop", "EXIT")
    (role,) = divided(copying)
    assert "LDGSTS" in families(role.loops[0]), "a copy that a branch steps over at the end is still every turn's"


def families_of(lines) -> list[str]:
    return [line.split(".")[0].split()[0] for line in lines]


def test_the_epilogue_in_a_flattened_loop_is_charged_to_tiles_not_to_steps():
    stored, tiles, steps = 128 * 16, 4, 64
    share = Share(132 * tiles * steps * FLOPS, 0, write_bytes=132 * tiles * stored)
    found = worked(flattened(), share)
    assert found.turns == pytest.approx(tiles * steps) and found.rounds == found.most_rounds == tiles
    per_tile = len(EPILOGUE) * tiles  # warp instructions of four warps, four a clock
    assert found.pipe_cycles["issue"] == pytest.approx(per_tile + 10 * tiles * steps, rel=0.05)
    tensor = tiles * steps * 4 * CHIP.cycles(parse(sass(WGMMA))[0])["tensor"]
    assert tensor < found.cta_cycles < 1.1 * tensor


def test_tiles_are_dealt_whole_unless_they_are_cut():
    share = Share(132 * 4 * 64 * FLOPS, 0, write_bytes=(132 * 3 + 10) * 128 * 16)
    whole, cut = worked(flattened(), share), worked(flattened(), replace(share, cuts_tiles=True))
    assert whole.rounds == pytest.approx(3 + 10 / 132) and whole.most_rounds == 4
    assert cut.most_rounds == cut.rounds and cut.uneven == 1
    assert whole.cta_cycles > 1.2 * cut.cta_cycles


def test_a_tma_store_sends_what_was_put_in_shared_memory():
    stores = ("STSM.16.M88.4 [R6], R24", "STSM.16.M88.4 [R7], R28", "UTMASTG.2D [UR8], [UR6]")
    text = program("loop:", WGMMA, *TOLD, TMA, "@P1 BRA next", *stores, "next:", "@P2 BRA loop", "EXIT")
    assert worked(text, Share(0, 0, write_bytes=132 * 3 * 2 * 128 * 16)).rounds == 3


def test_a_turn_s_copies_are_what_the_barrier_is_told():
    found = worked(flattened(), Share(132 * 10 * FLOPS, 0), shared_bytes=4 * 0x800 + 0x200, num_stages=1)
    assert found.async_bytes == pytest.approx(10 * 0x800)
    assert found.in_flight_bytes == 3 * 0x800  # the ring's four stages but the one that is read


def test_specialised_warps_have_roles_side_by_side():
    *roles, everyone = divided(specialised(), 384)
    assert [role.warps for role in roles] == [4, 1, 4] and everyone.warps == 12 and not everyone.loops
    assert [role.multiplies for role in roles] == [True, False, True]
    assert all("MUFU" in families(role.rounds) for role in roles), "the loop over tiles is around the loop over K"
    assert sum(len(role.rounds) for role in roles) == 2 * (2 + len(EPILOGUE)) + 2


def test_roles_share_the_flops_and_the_time():
    tiles, steps = 4, 64
    share = Share(132 * tiles * steps * 2 * FLOPS, 0, write_bytes=132 * tiles * 2 * 128 * 16)
    found = worked(specialised(), share, threads=384)
    assert found.roles == 3 and found.turns == pytest.approx(tiles * steps) and found.rounds == tiles
    wgmma = 4 * CHIP.cycles(parse(sass(WGMMA))[0])["tensor"]
    assert found.pipe_cycles["tensor"] == pytest.approx(2 * tiles * steps * wgmma)
    # One multiplies through the other's epilogue; the first copies and the last epilogue hide behind nothing.
    exposed = found.cta_cycles - found.pipe_cycles["tensor"]
    assert CHIP.hbm_latency < exposed < CHIP.hbm_latency + 400
    one = worked(specialised(1), replace(share, matrix_flops=share.matrix_flops / 2), threads=256)
    assert one.cta_cycles - one.pipe_cycles["tensor"] > exposed + 2 * len(EPILOGUE)


def test_loops_that_copy_for_loops_that_multiply_are_other_warps():
    feeding = ("feed:", "LDGSTS.E.128 [R9], [R6.64]", "LDGDEPBAR", "@P1 BRA feed", "EXIT")
    text = program("@P0 BRA feed", "k:", WGMMA, "@P2 BRA k", "STG.E.128 [R2.64], R24", "EXIT", *feeding)
    multiplying, copying, everyone = divided(text, 256)
    assert (multiplying.warps, copying.warps, everyone.warps) == (4, 4, 8)
    assert multiplying.multiplies and families(copying.loops[0])[0] == "LDGSTS"
    assert len(divided(text, 128)) == 1, "with one warpgroup there is nobody else"


def two_launches(scratch: float, flops: float = 1e9) -> tuple[model.Prediction, Cost]:
    cost = Cost(40e6, 1e6, {"bf16": flops})
    traffic = Traffic(40e6 + scratch, 1e6 + scratch, launches=2)
    product = replace(compiled("EXIT"), sass=program("k:", "LDGSTS.E.128 [R9], [R6.64]", WGMMA, "@P0 BRA k", "EXIT"))
    adding = compiled("LDG.E.128 R4, [R2.64]", "STG.E.128 [R2.64], R4", "EXIT", grid=(4096,))
    return predict(cost, traffic, [product, adding], H100), cost


def test_of_two_launches_the_one_that_multiplies_has_the_flops():
    product, adding = two_launches(scratch=2e6, flops=1e11)[0].works
    assert product.turns == pytest.approx(1e11 / 132 / FLOPS) and adding.turns == 0


def test_of_two_launches_the_first_reads_the_operands_and_the_second_what_the_first_left():
    found, cost = two_launches(scratch=2e6)
    product, _ = found.works
    assert found.launches == 2 and found.seconds >= found.bound.seconds
    assert product.turns == pytest.approx(40e6 / 132 / (128 * 16)), "all of the operands, none of the sums"
    alone = predict(cost, Traffic(40e6, 2e6), [], H100)
    rest = predict(Cost(2e6, 1e6), Traffic(2e6, 1e6), [], H100)
    apart = sum(entry.seconds - entry.launch_s for entry in (alone, rest))
    assert found.seconds - found.launch_s == pytest.approx(apart, rel=0.25)


def test_with_nothing_between_them_two_launches_share_the_bytes_by_their_threads():
    found, _ = two_launches(scratch=0)
    assert found.seconds >= found.bound.seconds and len(found.works) == 2

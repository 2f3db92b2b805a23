"""paged_attention/split_kv: heads and pages, edges of shares, sums of parts; emulated in this process."""

from dataclasses import replace

import pytest
import torch
from op_kernels import CPU, assert_right, emulated

from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels.paged_attention import split_kv
from rooflab.kernels.paged_attention.split_kv import SPLIT_KV_TUNING, UNIT_KEYS, SplitConfig, parts
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.attention import listen, shout
from rooflab.reference.spec import SCHEMES, Case

BF16, FP8 = SCHEMES["bf16"], SCHEMES["kv_fp8"]
SPEC = get_op("paged_attention")
KERNEL = get_kernel("paged_attention", "split_kv")
OUT, COUNTERS = 8, 12
"""Places of two arguments of a launch."""


def case_of(B=2, context=70, H=4, H_kv=2, D=64, block_size=16, ragged=False, **more):
    return Case(B=B, context=context, H=H, H_kv=H_kv, D=D, block_size=block_size, ragged=ragged, **more)


def run(inputs, **more):
    """One call in the emulator; its grids."""
    found, launches = emulated(KERNEL, **inputs, **more)
    return found, [launch.grid for launch in launches]


MORE = [(96, 4, 2, 24, FP8), (192, 16, 1, 8, BF16), (256, 9, 1, 1, FP8), (128, 1, 1, 128, BF16)]


@pytest.mark.parametrize(
    ("D", "H", "H_kv", "block_size", "scheme"),
    [(80, 7, 1, 16, FP8), *(pytest.param(*heads, marks=pytest.mark.more) for heads in MORE)],
)
def test_heads_groups_and_pages_of_every_size(D, H, H_kv, block_size, scheme):
    inputs = SPEC.make_inputs(case_of(1, 70, H, H_kv, D, block_size), scheme, CPU, 0)
    config = SPLIT_KV_TUNING.heuristic(case_of(1, 70, H, H_kv, D), scheme)
    found, grids = run(inputs, config=SplitConfig(config.warps, 2, 1, least=2))
    assert_right(SPEC, found, inputs, scheme)
    assert grids[0][0] > 1, "the one sequence is cut"


def test_a_dominant_key_at_every_edge_of_a_share_is_heard():
    case = case_of(2, 150, 2, 2, 64)
    plain = SPEC.make_inputs(case, BF16, CPU, 0)
    plain["seq_lens"][1] = 39
    config = SplitConfig(warps=2, num_stages=3, ctas_per_sm=1, least=2)
    for unit in (2, 4, 6, 8, 10):  # six shares of 10 and 3 units
        b, first = (0, unit * UNIT_KEYS) if unit < 10 else (1, (unit - 10) * UNIT_KEYS)
        for position in (first - 1, first):
            inputs = plain | {name: plain[name].clone() for name in ("q", "k_cache", "v_cache")}
            listen(inputs["q"], inputs["k_cache"])
            page = int(inputs["block_table"][b, position // 16])
            shout(inputs["k_cache"], inputs["v_cache"], (page, position % 16))
            found, grids = run(inputs, config=config)
            assert grids[0][0] >= 6
            assert_right(SPEC, found, inputs, BF16)


def test_padding_of_the_table_empty_sequences_and_shared_pages():
    inputs = SPEC.make_inputs(case_of(4, 100, 3, 1, 64, ragged=True, lse=True), BF16, CPU, 1)
    pages = -(-inputs["seq_lens"] // 16)
    for padding in (2**31 - 1, -(2**31)):
        for b, count in enumerate(pages.tolist()):
            inputs["block_table"][b, count:] = padding
        found, _ = run(inputs)
        assert_right(SPEC, found, inputs, BF16)
    assert (inputs["seq_lens"] == 0).any() and (found[1] == -torch.inf).any()
    shared = inputs | {"block_table": inputs["block_table"][:1].expand(4, -1)}
    found, _ = run(shared)
    assert_right(SPEC, found, shared, BF16)


@pytest.mark.parametrize("options", [{"window": 70, "lse": True}, {"softcap": 20.0, "sinks": True}], ids=str)
def test_options_of_sequences_that_are_cut(options):
    inputs = SPEC.make_inputs(case_of(2, 130, 4, 2, 64, ragged=True, **options), BF16, CPU, 0)
    found, grids = run(inputs, config=SplitConfig(warps=1, num_stages=2, ctas_per_sm=1, least=2))
    assert_right(SPEC, found, inputs, BF16)
    assert grids[0][0] > 2


def test_strided_queries_caches_out_and_lse_and_odd_places():
    inputs = SPEC.make_inputs(case_of(3, 60, 4, 2, 64, ragged=True, lse=True), BF16, CPU, 0)
    packed = torch.stack((inputs["k_cache"], inputs["v_cache"]), dim=1)
    inputs["k_cache"], inputs["v_cache"] = packed.unbind(1)
    for start in (2, 1):  # queries and outputs at multiples of 4 bytes, and of 2
        whole = torch.full((3, 8 * 64 + 3), torch.nan, dtype=torch.bfloat16)
        q = whole.clone()[:, start : start + 4 * 64].view(3, 4, 64).copy_(inputs["q"])
        out, lse = whole[:, start : start + 4 * 64].view(3, 4, 64), torch.zeros(4, 3).mT
        found, _ = run(inputs | {"q": q}, out=(out, lse))
        assert found[0] is out and found[1] is lse
        assert_right(SPEC, found, inputs, BF16)
        assert whole[:, :start].isnan().all() and whole[:, start + 256 :].isnan().all()


def test_parts_are_added_in_one_order_whoever_comes_last_and_the_counters_are_zero_again():
    """Heads of 13 parts, in groups of 4, and of 3 parts; in several orders of the warps, and a second time on the
    counters that the first launch leaves, as a graph does at each replay."""
    inputs = SPEC.make_inputs(case_of(2, 416, 4, 2, 64, lse=True, sinks=True), BF16, CPU, 0)
    inputs["seq_lens"] = torch.tensor([400, 90], dtype=torch.int32)
    config = SplitConfig(warps=1, num_stages=2, ctas_per_sm=1, least=2)
    assert parts([400, 90], 2, 2 * 2 * 26 // 2, 2) == 2 * (13 + 3)
    found, bits = [], []

    def twice(launch, size, args, seed):
        for _ in range(2):
            assert not emulate(launch, size, args, seed=seed).races
            assert not args[COUNTERS].any()
            bits.append(args[OUT].clone())
            args[OUT].zero_()
        args[OUT].copy_(bits[-1])

    for seed in (0, 1):
        with emulating_cuda(lambda *launch, seed=seed: twice(*launch, seed)):
            found.append(split_kv.split_kv(**inputs, config=config))
    assert_right(SPEC, found[0], inputs, BF16)
    assert all(torch.equal(bits[0], other) for other in bits)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("order", ["relaxed", "acquire", "release"])
def test_a_weaker_order_at_the_counter_is_a_race(order):
    inputs, races = SPEC.make_inputs(case_of(1, 70), BF16, CPU, 0), []

    def weakened(launch, size, args):
        assert launch.ptx.count("atom.acq_rel.gpu") == 1
        ptx = launch.ptx.replace("atom.acq_rel.gpu", f"atom.{order}.gpu")
        races.extend(emulate(replace(launch, ptx=ptx), size, args).races)

    with emulating_cuda(weakened):
        split_kv.split_kv(**inputs, config=SplitConfig(warps=1, num_stages=2, ctas_per_sm=1, least=2))
    assert races and all("write-read race on global memory" in race for race in races)


def test_without_keys_nothing_is_launched_or_zeros_are_written_and_a_sink_alone_is_heard():
    inputs = SPEC.make_inputs(case_of(2, 20), BF16, CPU, 0)
    none = {name: inputs[name][:0] for name in ("q", "block_table", "seq_lens")}
    found, grids = run(inputs | none)
    assert found.shape == (0, 4, 64) and grids == []
    for options in ({}, {"sinks": True}):
        inputs = SPEC.make_inputs(case_of(3, 0, lse=True, **options), BF16, CPU, 0)
        found, grids = run(inputs)
        assert_right(SPEC, found, inputs, BF16)
        assert len(grids) == 1

"""paged_attention/split_kv: shares of the work, parts that are added up, what it refuses; emulated in this process."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from op_kernels import CPU, META, assert_right, slow

from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.paged_attention import split_kv
from rooflab.kernels.paged_attention.split_kv import SPLIT_KV, UNIT, SplitConfig, grid, parts, ring_bytes, virtual_heads
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.attention import listen, shout
from rooflab.reference.spec import SCHEMES, Case

BF16, FP8 = SCHEMES["bf16"], SCHEMES["kv_fp8"]
SPEC = get_op("paged_attention")
KERNEL = get_kernel("paged_attention", "split_kv")
OUT, COUNTERS = 8, 12
"""Places of two arguments of a launch."""
LLAMA = Case(B=64, context=4096, H=32, H_kv=8, D=128, block_size=16, ragged=False)


def case_of(B=2, context=70, H=4, H_kv=2, D=64, block_size=16, ragged=False, **more):
    return Case(B=B, context=context, H=H, H_kv=H_kv, D=D, block_size=block_size, ragged=ragged, **more)


def run(inputs, **more):
    """One call in the emulator; its grids."""
    grids, races = [], []

    def handle(launch, size, args):
        grids.append(size)
        races.extend(emulate(launch, size, args).races)

    with emulating_cuda(handle):
        found = split_kv.split_kv(**inputs, **more)
    assert races == []
    return found, grids


def passes(found, inputs, scheme=BF16):
    assert_right(SPEC, found, inputs, scheme)


def brute_parts(lengths, sets, ctas, least):
    """`parts`, unit by unit."""
    segments = [length for length in lengths for _ in range(sets) if length]
    units = [segment for segment, length in enumerate(segments) for _ in range(-(-length // UNIT))]
    shares = max(min(ctas, len(units) // least), 1)
    owners = {}
    for g in range(shares):
        for unit in range(g * len(units) // shares, (g + 1) * len(units) // shares):
            owners.setdefault(units[unit], set()).add(g)
    return sum(len(found) for found in owners.values() if len(found) > 1)


@pytest.mark.parametrize("lengths", [[0], [1], [17, 0, 300], [4096] * 3, [5, 1000, 0, 0, 33, 64]])
@pytest.mark.parametrize("ctas", [1, 3, 7, 132])
def test_parts_are_those_of_shares_cut_unit_by_unit(lengths, ctas):
    for sets, least in ((1, 1), (2, 4), (3, 2)):
        assert parts(lengths, sets, ctas, least) == brute_parts(lengths, sets, ctas, least)


def test_all_ctas_are_resident_and_have_the_bytes_on_their_way_that_hbm_needs():
    """36 KB for an SM: 4.8 TB/s for 1 us, of an H200, over 132 SMs."""
    for scheme in (BF16, FP8):
        for D in (64, 80, 96, 128, 192, 256):
            for H, H_kv in ((32, 8), (64, 8), (9, 3), (16, 1), (40, 1), (8, 8)):
                case = LLAMA.but(H=H, H_kv=H_kv, D=D)
                config = SPLIT_KV.heuristic(case, scheme)
                assert SPLIT_KV.is_legal(config, case, scheme), (case.id, config)
                ring = ring_bytes(config, D, H // H_kv, scheme)
                assert config.ctas_per_sm * (ring + 1024) <= 228 * 1024
                ahead = config.ctas_per_sm * config.warps * (config.num_stages - 1) * 2 * UNIT * D
                assert ahead * scheme.weight.itemsize >= 36 * 1024, (case.id, config)
    assert len(KERNEL.tunable.legal_configs(LLAMA, BF16)) > 10


def test_the_grid_is_what_the_card_holds_or_what_the_table_has_work_for():
    def ctas(B, slots, window, sets, ctas_per_sm, least):
        q, cache = torch.empty(B, sets, 64, device=META), torch.empty(1, 1, sets, 64, device=META)
        table = torch.empty(B, slots, dtype=torch.int32, device=META)
        return grid(q, cache, table, window, SplitConfig(1, 2, ctas_per_sm, least))

    assert ctas(64, 4096, None, 1, 2, 4) == (2 * HOPPER_SMS, 1)
    assert ctas(1, 4096, None, 1, 1, 4) == (4096 // UNIT // 4, 1)
    assert ctas(1, 4096, 100, 1, 1, 4) == (1, 1)
    assert ctas(1, 2**20, 64 * 20, 2, 1, 4) == (40, 2)
    assert ctas(3, 0, None, 1, 1, 4) == (1, 1)
    assert virtual_heads(20, 1) == 2 and virtual_heads(32, 8) == 8 and virtual_heads(17, 1) == 2


def test_lengths_change_the_bytes_and_not_the_shares():
    """Log-normal lengths of the same sum: as many bytes but for the parts, and every CTA has its share to a unit."""
    even = SPEC.make_inputs(LLAMA, BF16, META, 0)
    lengths = torch.exp(torch.randn(64, generator=torch.Generator().manual_seed(0)) + 7.8).clamp(16, 4096)
    ragged = even | {"seq_lens": (lengths / lengths.sum() * 64 * 2048).to(torch.int32)}
    sizes = [
        get_kernel("paged_attention", "split_kv").traffic_of(inputs).bytes / int(inputs["seq_lens"].sum())
        for inputs in (even, ragged)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.03)
    least = SPEC.cost_of(even)
    assert get_kernel("paged_attention", "split_kv").traffic_of(even).bytes == pytest.approx(
        least.read_bytes + least.write_bytes, rel=0.02
    )


HEADS = [(80, 7, 1, 16), (96, 4, 2, 24), (192, 16, 1, 8), (256, 9, 1, 1), (128, 1, 1, 128)]
LONG_OF = {BF16: HEADS[1::2], FP8: HEADS[::2]}
"""Which of them are emulated in `make test-full` alone: each is in the short suite in one scheme."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("D", "H", "H_kv", "block_size", "scheme"),
    [
        slow(*heads, scheme) if heads in long else (*heads, scheme)
        for scheme, long in LONG_OF.items()
        for heads in HEADS
    ],
)
def test_heads_groups_and_pages_of_every_size(D, H, H_kv, block_size, scheme):
    inputs = SPEC.make_inputs(case_of(1, 70, H, H_kv, D, block_size), scheme, CPU, 0)
    config = SPLIT_KV.heuristic(case_of(1, 70, H, H_kv, D), scheme)
    found, grids = run(inputs, config=SplitConfig(config.warps, 2, 1, least=2))
    passes(found, inputs, scheme)
    assert grids[0][0] > 1, "the one sequence is cut"


def test_a_config_is_legal_only_with_whole_heads_and_a_unit_on_its_way():
    assert SPLIT_KV.is_legal(SplitConfig(1, 2, 4, 2), LLAMA.but(H=40, H_kv=1))
    assert not SPLIT_KV.is_legal(SplitConfig(2, 2, 4, 2), LLAMA.but(H=40, H_kv=1)), "three virtual heads"
    assert not SPLIT_KV.is_legal(SplitConfig(1, 1, 4, 2), LLAMA), "a unit would be read before its copies have arrived"


def test_a_dominant_key_at_every_edge_of_a_share_is_heard():
    case = case_of(2, 150, 2, 2, 64)
    plain = SPEC.make_inputs(case, BF16, CPU, 0)
    plain["seq_lens"][1] = 39
    config = SplitConfig(warps=2, num_stages=3, ctas_per_sm=1, least=2)
    units = 10 + 3
    edges = {g * units // 6 for g in range(1, 6)}  # six shares of 13 units
    for unit in sorted(edges):
        b, first = (0, unit * UNIT) if unit < 10 else (1, (unit - 10) * UNIT)
        for position in (first - 1, first):
            inputs = plain | {name: plain[name].clone() for name in ("q", "k_cache", "v_cache")}
            listen(inputs["q"], inputs["k_cache"])
            page = int(inputs["block_table"][b, position // 16])
            shout(inputs["k_cache"], inputs["v_cache"], (page, position % 16))
            found, grids = run(inputs, config=config)
            assert grids[0] == (6,) or grids[0][0] >= 6
            passes(found, inputs)


def test_padding_of_the_table_empty_sequences_and_shared_pages():
    inputs = SPEC.make_inputs(case_of(4, 100, 3, 1, 64, ragged=True, lse=True), BF16, CPU, 1)
    pages = -(-inputs["seq_lens"] // 16)
    for padding in (2**31 - 1, -(2**31)):
        for b, count in enumerate(pages.tolist()):
            inputs["block_table"][b, count:] = padding
        found, _ = run(inputs)
        passes(found, inputs)
    assert (inputs["seq_lens"] == 0).any() and (found[1] == -torch.inf).any()
    shared = inputs | {"block_table": inputs["block_table"][:1].expand(4, -1)}
    found, _ = run(shared)
    passes(found, shared)


@pytest.mark.parametrize("options", [{"window": 70, "lse": True}, {"softcap": 20.0, "sinks": True}], ids=str)
def test_options_of_sequences_that_are_cut(options):
    inputs = SPEC.make_inputs(case_of(2, 130, 4, 2, 64, ragged=True, **options), BF16, CPU, 0)
    found, grids = run(inputs, config=SplitConfig(warps=1, num_stages=2, ctas_per_sm=1, least=2))
    passes(found, inputs)
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
        passes(found, inputs)
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
    passes(found[0], inputs)
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


def test_launches_that_may_run_at_once_have_different_counters(monkeypatch):
    """Streams that run and streams that are captured, of a GPU that is not there."""
    state, made, waited = SimpleNamespace(stream=1, captures=False), [], []

    def zeros(count, device):
        made.append(torch.zeros(count, dtype=torch.int32))
        return made[-1]

    def stream():
        return SimpleNamespace(cuda_stream=state.stream, synchronize=lambda: waited.append(state.captures))

    def ask(count, address, stream=1, captures=False):
        state.stream, state.captures = stream, captures
        parts = SimpleNamespace(device=torch.device("cuda", 0), data_ptr=lambda: address)
        found = split_kv.counters(count, parts)
        assert found.numel() >= count and not found.any()
        return range(found.data_ptr(), found.data_ptr() + 4 * found.numel())

    monkeypatch.setattr(split_kv, "_zeros", zeros)
    monkeypatch.setattr(split_kv, "_counters", {})
    monkeypatch.setattr(split_kv, "_unused", {})
    monkeypatch.setattr(split_kv, "BLOCK", 1300)
    for name, value in {"device": lambda _: nullcontext(), "current_stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)

    early = ask(300, 64, captures=True)  # no block yet: a captured memset
    own = [early, ask(300, 64), ask(300, 64, stream=2)]
    assert ask(200, 128) == own[1] and waited == [False] and len(made) == 2
    own += [ask(300, 64, captures=True), ask(300, 128, stream=2, captures=True)]
    assert ask(200, 64, stream=3, captures=True) == own[3] and len(made) == 2, "zeroed before the capture"
    own += [ask(400, 64, captures=True), ask(300, 192, captures=True), ask(300, 192, captures=True)]
    assert len(made) == 5 and waited == [False], "the block is used up"
    own += [ask(300, 64, stream=3), ask(300, 192, captures=True)]
    assert len(made) == 6 and waited == [False, False], "a launch outside of a capture makes the next one"
    ranges = sorted((span.start, span.stop) for span in own)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


@pytest.mark.gpu
def test_graphs_that_replay_at_once_and_launches_between_them_agree():
    inputs = SPEC.make_inputs(case_of(16, 1000, 32, 8, 128), BF16, torch.device("cuda"), 0)
    want, graphs = split_kv.split_kv(**inputs), []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = split_kv.split_kv(**inputs)
        graphs.append((graph, out, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        found = split_kv.split_kv(**inputs)
    torch.cuda.synchronize()
    assert all(torch.equal(want, out) for out in (found, *(out for _, out, _ in graphs)))


def test_nothing_to_do_launches_nothing():
    inputs = SPEC.make_inputs(case_of(2, 20), BF16, CPU, 0)
    none = {name: inputs[name][:0] for name in ("q", "block_table", "seq_lens")}
    found, grids = run(inputs | none)
    assert found.shape == (0, 4, 64) and grids == []
    found, grids = run(SPEC.make_inputs(case_of(2, 0, lse=True), BF16, CPU, 0))
    assert torch.count_nonzero(found[0]) == 0 and (found[1] == -torch.inf).all() and len(grids) == 1
    inputs = SPEC.make_inputs(case_of(3, 0, lse=True, sinks=True), BF16, CPU, 0)
    passes(run(inputs)[0], inputs)

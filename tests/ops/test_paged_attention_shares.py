"""paged_attention/split_kv on the host: shares of the work, its grid, its configs, and the counters of its launches."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from op_kernels import META

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.paged_attention import split_kv
from rooflab.kernels.paged_attention.split_kv import UNIT_KEYS, SplitConfig, grid, parts
from rooflab.reference.paged_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case


def brute_parts(lengths, sets, ctas, least):
    """`parts`, unit by unit."""
    segments = [length for length in lengths for _ in range(sets) if length]
    units = [segment for segment, length in enumerate(segments) for _ in range(-(-length // UNIT_KEYS))]
    shares = max(min(ctas, len(units) // least), 1)
    owners = {}
    for g in range(shares):
        for unit in range(g * len(units) // shares, (g + 1) * len(units) // shares):
            owners.setdefault(units[unit], set()).add(g)
    return sum(len(found) for found in owners.values() if len(found) > 1)


@pytest.mark.parametrize("lengths", [[0], [1], [17, 0, 300], [4096] * 3, [5, 1000, 0, 0, 33, 64]])
def test_parts_are_those_of_shares_cut_unit_by_unit(lengths):
    for ctas, (sets, least) in itertools.product((1, 3, 7, 132), ((1, 1), (2, 4), (3, 2))):
        assert parts(lengths, sets, ctas, least) == brute_parts(lengths, sets, ctas, least)


@pytest.mark.parametrize(
    ("B", "slots", "window", "sets", "ctas_per_sm", "found"),
    [
        (64, 4096, None, 1, 2, (2 * HOPPER_SMS, 1)),
        (1, 4096, None, 1, 1, (4096 // UNIT_KEYS // 4, 1)),
        (1, 4096, 100, 1, 1, (1, 1)),
        (1, 2**20, 64 * 20, 2, 1, (40, 2)),
        (3, 0, None, 1, 1, (1, 1)),
    ],
)
def test_the_grid_is_what_the_card_holds_or_what_the_table_has_work_for(B, slots, window, sets, ctas_per_sm, found):
    q, cache = torch.empty(B, sets, 64, device=META), torch.empty(1, 1, sets, 64, device=META)
    table = torch.empty(B, slots, dtype=torch.int32, device=META)
    assert grid(q, cache, table, window, SplitConfig(1, 2, ctas_per_sm, least=4)) == found


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there: the stream that runs, whether it is captured, and the zeros that were made."""
    state, zeros = SimpleNamespace(stream=1, captured=False, made=[]), torch.zeros

    def on_the_cpu(count, **options):
        state.made.append(zeros(count, dtype=torch.int32))
        return state.made[-1]

    def stream():
        return SimpleNamespace(cuda_stream=state.stream, synchronize=lambda: None)

    monkeypatch.setattr(split_kv, "COUNTER_BLOCK", 1300)
    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captured)
    return state


def test_launches_that_may_run_at_once_have_different_counters(gpu):
    def ask(count, address, stream=1, captured=False):
        gpu.stream, gpu.captured = stream, captured
        found = split_kv.counters(count, SimpleNamespace(device=torch.device("cuda", 77), data_ptr=lambda: address))
        assert found.numel() >= count and not found.any()
        return range(found.data_ptr(), found.data_ptr() + 4 * found.numel())

    own = [ask(300, 64, captured=True), ask(300, 64), ask(300, 64, stream=2)]
    assert ask(200, 128) == own[1] and len(gpu.made) == 2, "the first capture found no block"
    own += [ask(300, 64, captured=True), ask(300, 128, stream=2, captured=True)]
    assert ask(200, 64, stream=3, captured=True) == own[3] and len(gpu.made) == 2, "zeroed before the capture"
    own += [ask(400, 64, captured=True), ask(300, 192, captured=True), ask(300, 192, captured=True)]
    assert len(gpu.made) == 5, "the block is used up"
    own += [ask(300, 64, stream=3), ask(300, 192, captured=True)]
    assert len(gpu.made) == 6, "a launch outside of a capture makes the next one"
    ranges = sorted((span.start, span.stop) for span in own)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


@pytest.mark.gpu
def test_graphs_that_replay_at_once_and_launches_between_them_agree():
    case = Case(B=16, context=1000, H=32, H_kv=8, D=128, block_size=16, ragged=False)
    inputs = SPEC.make_inputs(case, SCHEMES["bf16"], torch.device("cuda"), 0)
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

"""paged_attention/chunked and library: chunks of queries among decode rows, tiles, masks; interpreted."""

import pytest
import torch
from op_kernels import CPU, assert_right

from rooflab.kernels.paged_attention import chunked, library
from rooflab.kernels.registry import get_op
from rooflab.reference.spec import SCHEMES, Case

FP32 = SCHEMES["fp32"]
SPEC = get_op("paged_attention")
SMALL = chunked.Config(16, 16, num_warps=4, num_stages=1)


def inputs_of(B=3, context=50, H=4, H_kv=2, D=16, block_size=8, ragged=False, scheme=FP32, seed=0, **more):
    case = Case(B=B, context=context, H=H, H_kv=H_kv, D=D, block_size=block_size, ragged=ragged, **more)
    return SPEC.make_inputs(case, scheme, CPU, seed)


def bounds(*counts):
    return torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0)).to(torch.int32)


@pytest.mark.parametrize(
    ("sizes", "queries"),
    [
        *(({"H": 2 * group}, queries) for group, queries in ((1, 9), (3, 2), (4, 3), (7, 3), (8, 2), (16, 2), (20, 1))),
        *(({"H": 2, "H_kv": 1, "D": D}, 5) for D in (24, 96, 256)),  # heads are padded to powers of two
        *(({"H": 2, "H_kv": 1, "context": 40, "block_size": size}, 12) for size in (1, 24, 32, 256)),
    ],
    ids=str,
)
def test_a_tile_holds_any_group_and_heads_and_pages_of_every_size(sizes, queries):
    inputs = inputs_of(**{"B": 1, "context": 20, **sizes}, queries=queries)
    assert_right(SPEC, chunked.chunked(**inputs, config=SMALL), inputs, FP32)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kernel", [chunked.chunked, library.library], ids=["chunked", "library"])
@pytest.mark.parametrize("window", [None, 1, 17])
@pytest.mark.parametrize(("lengths", "queries"), [((50, 17, 30, 0, 33), (1, 17, 20, 0, 0)), ((5, 5), (9, 3))])
def test_decode_rows_chunks_whole_prompts_none_at_all_and_more_than_keys_in_one_call(kernel, window, lengths, queries):
    inputs = inputs_of(len(lengths), 50) | {"window": window, "q": torch.randn(sum(queries), 4, 16)}
    inputs |= {"seq_lens": torch.tensor(lengths, dtype=torch.int32), "cu_seqlens_q": bounds(*queries)}
    assert_right(SPEC, kernel(**inputs), inputs, FP32)


@pytest.mark.parametrize("block_n", [16, 64])
def test_what_lies_before_every_window_may_be_anything_and_a_wide_window_hides_nothing(block_n):
    """A page that no query sees any more is given back: another sequence writes it, and its entry may name none."""
    inputs = inputs_of(2, 70, queries=3, window=17)
    inputs["seq_lens"][1] = 0
    config = chunked.Config(16, block_n, num_warps=4, num_stages=1)
    plain = chunked.chunked(**inputs, config=config)
    wide, none = (chunked.chunked(**inputs | {"window": window}, config=config) for window in (2**40, None))
    assert torch.equal(wide, none)
    for name in ("k_cache", "v_cache"):
        inputs[name][inputs["block_table"][0, :6].long()] = torch.nan
    assert torch.equal(chunked.chunked(**inputs, config=config), plain)
    inputs["block_table"][0, :6] = torch.tensor([2**31 - 1, -(2**31), -1, 9999, -1, -1])
    assert torch.equal(chunked.chunked(**inputs, config=config), plain)


def test_no_batch_has_more_tiles_than_the_grid():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        B, group, block_m = (int(torch.randint(1, high, (1,), generator=generator)) for high in (9, 9, 40))
        counts = torch.randint(0, 30, (B,), generator=generator)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))[:-1] * group // block_m + torch.arange(B)
        tiles = -(-counts * group // block_m)
        grid = chunked.tiles_at_most(int(counts.sum()), B, group, block_m)
        assert (starts[:-1] + tiles[:-1] <= starts[1:]).all() and starts[-1] + tiles[-1] <= grid

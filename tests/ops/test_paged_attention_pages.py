"""paged_attention/tma_pages in the emulator: pages that are given back, and pages that lie too far apart."""

import pytest
import torch
from op_kernels import META, python_without_interpreter

from rooflab.kernels.registry import get_kernel

KERNEL = get_kernel("paged_attention", "tma_pages")


EDGES = """
import torch
from rooflab.bench.emulate.ours import every_launch
from rooflab.bench.emulator import Launches
from rooflab.kernels.paged_attention import tma_pages
from rooflab.kernels.registry import get_op
from rooflab.reference.spec import SCHEMES, Case

case = Case(B=2, context=70, H=2, H_kv=2, D=64, block_size=8, ragged=False, queries=3, lse=True)
inputs = get_op("paged_attention").make_inputs(case, SCHEMES["bf16"], torch.device("cpu"), 0)
inputs["seq_lens"][1] = 0

def same(found, wanted):
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))

with every_launch(Launches()):
    plain = tma_pages.tma_pages(**inputs)
    # No key and a sink of -inf: nothing, and not -inf - -inf.
    sinks = torch.tensor([-torch.inf] * 2)
    assert same(tma_pages.tma_pages(**inputs, sinks=sinks), plain)
    # Pages before every window have been given back.
    windowed = tma_pages.tma_pages(**inputs, window=17)
    inputs["v_cache"][inputs["block_table"][0, :6].long()] = torch.nan
    assert same(tma_pages.tma_pages(**inputs, window=17), windowed)
    inputs["block_table"][0, :6] = torch.tensor([-1, 2**31 - 1, -(2**31), -1, 0, 0])
    assert same(tma_pages.tma_pages(**inputs, window=17), windowed)
"""


@pytest.mark.slow  # 25 s
def test_empty_sequences_with_a_sink_and_pages_given_back():
    python_without_interpreter("-c", EDGES)


def test_pages_too_far_apart_for_one_map_are_refused():
    apart = torch.empty_strided((2**23, 16, 2, 64), (16 * 128 + 8, 128, 64, 1), dtype=torch.bfloat16, device=META)
    given = {"q": apart[0, :3, :1], "k_cache": apart, "v_cache": apart, "block_table": None, "seq_lens": None}
    assert "larger common factor" in KERNEL.why_not_args(given).reason

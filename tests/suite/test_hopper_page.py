"""The page about Hopper and the first screen of the README say what has run on a card and what has not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hopper import make as hopper

ROOT = Path(__file__).parents[2]


def test_the_readme_says_what_has_run_on_a_gpu():
    records = [record for gpu in ("h100", "h200") for record in hopper.records_on(gpu)]
    first_screen = " ".join((ROOT / "README.md").read_text().split("## ")[0].split())
    assert hopper.contact(records) in first_screen, "python results/hopper/make.py says it"
    assert hopper.contact(records) in (ROOT / "results" / "hopper" / "README.md").read_text()


@pytest.mark.parametrize(("ratio", "verdict"), [(2.0, hopper.FASTER), (1.0, hopper.CANNOT_TELL), (0.5, hopper.SLOWER)])
def test_a_target_is_told_only_if_both_ends_of_the_range_agree(ratio, verdict):
    """Published over predicted times of 0.8 to 1.6 are the range."""
    ends = ratio / 1.6, ratio / 0.8
    found = hopper.RivalRatio("gemm.any", "M=1", "tma", "vllm", ratio, hopper.PREDICTED, ends)
    assert hopper.range_of([found, found]) == pytest.approx(ends)
    assert hopper.verdict(*hopper.range_of([found])) == verdict


def test_a_measured_ratio_is_its_own_range():
    found = [hopper.RivalRatio("gemm.any", "M=1", "tma", "library", ratio, hopper.MEASURED) for ratio in (0.5, 2.0)]
    assert hopper.range_of(found) == pytest.approx((1.0, 1.0))

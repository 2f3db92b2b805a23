"""Tensor maps that a kernel makes: a fence of their proxy stands between the making and the use."""

import pytest

from rooflab.bench.ptx.races.vector_clocks import MapOrder, VectorClocks

MAP, MADE = 0x7F00_0000_0000, 5


@pytest.fixture
def clocks():
    return VectorClocks(2, 4)


@pytest.fixture
def maps(clocks):
    return MapOrder(clocks)


def test_a_map_of_the_host_needs_no_fence(maps):
    assert maps.use(0, 1, MAP) is None


def test_a_map_that_was_fenced_by_its_user_is_in_order(maps):
    maps.write(0, 1, MAP, MADE)
    assert maps.use(0, 1, MAP) == MADE
    maps.fence(0, 1, MAP)
    assert maps.use(0, 1, MAP) is None


def test_a_fence_by_another_warp_counts_after_a_barrier(maps, clocks):
    maps.write(0, 0, MAP, MADE)
    maps.fence(0, 0, MAP)
    assert maps.use(0, 2, MAP) == MADE
    clocks.barrier(0, range(4))
    assert maps.use(0, 2, MAP) is None


def test_a_fence_that_the_making_is_not_ordered_before_does_not_count(maps, clocks):
    maps.write(0, 0, MAP, MADE)
    maps.fence(0, 2, MAP)
    clocks.barrier(0, range(4))
    assert maps.use(0, 2, MAP) == MADE
    maps.fence(0, 2, MAP)
    assert maps.use(0, 2, MAP) is None


def test_a_map_made_anew_needs_another_fence(maps):
    for _ in range(2):
        maps.write(0, 1, MAP, MADE)
        assert maps.use(0, 1, MAP) == MADE
        maps.fence(0, 1, MAP)


def test_fences_are_of_one_address_and_one_cta(maps):
    maps.write(0, 1, MAP, MADE)
    maps.fence(0, 1, MAP + 128)
    maps.fence(1, 1, MAP)
    assert maps.use(0, 1, MAP) == MADE
    assert maps.use(1, 1, MAP) is None

import os
import threading

import pytest
import torch

from rooflab.bench.timing import pinning
from rooflab.bench.timing.pinning import assign, pinned_threads

CORES = {0: "a", 1: "a", 2: "b", 3: "b"}
"""Two cores of two hardware threads each."""


@pytest.mark.parametrize(
    ("wanted", "allowed", "places"),
    [
        ([2], {0, 1, 2, 3}, [2]),
        ([0, 2], {0, 1, 2, 3}, [0, 2]),
        ([0, 0], {0, 1, 2, 3}, [0, 2]),
        ([0, 1], {0, 1, 2, 3}, [0, 2]),
        ([3, 3, 3, 3], {0, 1, 2, 3}, [3, 0, 1, 2]),
        ([0, 1], {0, 1}, [0, 1]),
        ([5, 0], {0, 2}, [2, 0]),
    ],
)
def test_threads_stay_where_they_are_and_share_no_core_while_one_is_free(wanted, allowed, places):
    assert assign(wanted, allowed, CORES | {5: "c"}) == places


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")


@needs_affinity
def test_the_thread_is_held_on_one_processor_and_let_go(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), pinned_threads() as note:
        assert note == "threads pinned" and len(os.sched_getaffinity(0)) == 1
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_a_thread_that_was_started_meanwhile_may_leave(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    allowed = os.sched_getaffinity(0)
    stop = threading.Event()
    with pinned_threads():
        thread = threading.Thread(target=stop.wait)
        thread.start()
        assert len(os.sched_getaffinity(thread.native_id)) == 1, "it has inherited the processor"
    found = os.sched_getaffinity(thread.native_id)
    stop.set()
    thread.join()
    assert found == allowed


@needs_affinity
def test_what_cannot_be_pinned_says_why(monkeypatch):
    allowed = os.sched_getaffinity(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: len(allowed) + 1)
        with pinned_threads() as note:
            assert note == f"threads not pinned: {len(allowed) + 1} on {len(allowed)} processors"

    def refuses(thread, places):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    with pinned_threads() as note:
        assert note == "threads not pinned: Operation not permitted"
    monkeypatch.setattr(pinning, "_threads", lambda count: ())
    with pinned_threads() as note:
        assert note == "threads not pinned: 0 of 1 were found"
    monkeypatch.delattr(os, "sched_setaffinity")
    with pinned_threads() as note:
        assert note == "threads not pinned: this system does not offer it"

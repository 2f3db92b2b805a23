"""Which records give `explain` a measured time, and in which config: those that speak for the kernel, and no other."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from test_explain import CASE, H100, record, target

from rooflab.bench.predict.targets import measured_in
from rooflab.kernels import registry

EARLY, LATE = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"


@pytest.mark.parametrize(
    "changes",
    [{"metrics": {"pair": 1.0}}, {"kind": "ab"}, {"l2_state": "warm"}, {"kernel": "another"}],
    ids=["a reading of an A/B", "an A/B", "a warm L2", "another kernel"],
)
def test_a_reading_that_does_not_speak_for_the_kernel_is_left_out(changes):
    own, other = record(timestamp=EARLY), record(timestamp=LATE, latency_median_ms=0.5, **changes)
    assert measured_in([own, other], [target()], H100) == ([target()], {target(): 0.025})
    with pytest.raises(ValueError, match="records: expected a measured time on h100-sxm"):
        measured_in([other], [target()], H100)


def test_a_time_is_explained_in_the_config_in_which_it_was_measured():
    kernel = registry.get_kernel("rmsnorm", "fused")
    config = kernel.configs(CASE)[-1]
    fused, library = target("fused"), target()
    tuned = record(kernel="fused", backend="triton", config=asdict(config))
    chosen, times = measured_in([tuned], [library, fused], H100)
    assert chosen[0] == library and chosen[1].config == config and times == {chosen[1]: 0.025}
    gone = record(kernel="fused", backend="triton", config={"no_such_field": 1}, timestamp=LATE)
    assert measured_in([tuned, gone], [library, fused], H100) == (chosen, times)

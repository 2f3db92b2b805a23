"""The cost and the gain of speculation: through the server and its metrics, on the clock, and the needed acceptance."""

import pytest

from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.speculation import SpeculativeSteps, break_even, priced, speculative, tokens_a_step
from rooflab.bench.latency.step_model import KernelTimes, StepWork
from rooflab.bench.load.arrivals import Arrivals
from rooflab.bench.load.data import Data
from rooflab.bench.load.load_run import Plan
from rooflab.engine.speculate.drafter import Speculation
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device

KERNELS = KernelTimes(get_architecture("llama-3.1-8b"), get_device("h100-sxm"))


def test_a_draft_breaks_even_where_its_tokens_are_worth_its_time():
    assert tokens_a_step(0.0, 4) == 1 and tokens_a_step(1.0, 4) == 5 and tokens_a_step(0.5, 2) == 1.75
    for drafted, chance in ((1, 0.3), (4, 0.6), (8, 0.9)):
        assert break_even(tokens_a_step(chance, drafted), drafted) == pytest.approx(chance)
    assert break_even(0.97, 4) == 0.0 and break_even(5.01, 4) is None


def test_drafts_cost_what_computes_them():
    work = StepWork(4, 4 * 512, (), 20, 16)
    plain = priced(speculative(Speculation("ngram"), KERNELS), 4, 512, 4)
    assert plain["draft_ms"] == 0 and plain["plain_ms"] < plain["verify_ms"] < 1.2 * plain["plain_ms"]
    one = KernelTimes(get_architecture("llama-3.1-8b"), get_device("h100-sxm"), bounds=True)
    eagle, same = (
        speculative(Speculation("eagle", 4, sized=True), one),
        speculative(Speculation("draft", 4, "llama-3.1-8b"), one),
    )
    share = eagle.draft_s(work) / same.draft_s(work)
    assert 1 / 32 < share < 1 / 32 + 0.1, "the output head beside the layer"
    with pytest.raises(ValueError, match="draft: expected"):
        speculative(Speculation("draft", 4, "smollm2-135m"), KERNELS)


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_on_the_clock_tokens_come_by_chance_and_break_even_is_as_predicted(acceptance):
    class Given:
        """A step takes a second, and a tenth more for each drafted token."""

        basis = "made up"

        def seconds(self, work):
            return 1.0 + 0.1 * work.drafted if work.decodes else 0.0

    plan = Plan(data=Data(input_len=(4, 4), output_len=(400, 400)), num_prompts=6, arrivals=Arrivals(1e-4, "constant"))
    settings = ClockSettings(99, max_num_seqs=1, num_speculative_tokens=4, acceptance=acceptance)
    trace = simulate(SpeculativeSteps(Given()), plan, settings)
    tpot = [(one.chunks[-1].time_s - one.chunks[0].time_s) / 399 for one in trace.requests]
    assert sum(tpot) / len(tpot) == pytest.approx(1.4 / tokens_a_step(acceptance, 4), rel=0.05)
    assert {one.output_tokens for one in trace.requests} == {400}
    assert priced(SpeculativeSteps(Given()), 1, 99, 4)["break_even_acceptance"] == pytest.approx(break_even(1.4, 4))
    with pytest.raises(ValueError, match=r"acceptance: expected a number in \[0, 1\], got 1.5"):
        ClockSettings(99, acceptance=1.5)

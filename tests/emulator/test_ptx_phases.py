"""The order of arrivals and waits at mbarriers and numbered barriers: what another order of the same run would break.

Every kernel here ends in the schedule that it gets, so its results do not show the fault.
"""

from __future__ import annotations

import pytest
from ptx_lines import SHARED, launch

SET_UP = """mov.u32 %r2, s; add.u32 %r3, %r2, 8; add.u32 %r4, %r2, 64; shr.u32 %r5, %r0, 5; and.b32 %r6, %r0, 31;
    setp.eq.u32 %p1, %r6, 0; @%p0 mbarrier.init.shared.b64 [%r2], {}; @%p0 mbarrier.init.shared.b64 [%r3], {};
    @%p0 st.shared.u32 [%r2+128], 0; bar.sync 0; """
"""%r2 and %r3 hold mbarriers, which the steps call 2 and 3; %p1 is lane 0 of a warp, and %r5 the warp."""
STEPS = {
    "wait": "W{at}: mbarrier.try_wait.parity.shared.b64 %p7, [%r{b}], {parity}; @!%p7 bra W{at};",
    "ask": "mbarrier.try_wait.parity.shared.b64 %p7, [%r{b}], {parity};",  # and nobody looks at the answer
    "arrive": "@%p1 mbarrier.arrive.shared.b64 _, [%r{b}];",
    "expect": "@%p1 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r{b}], 0;",
    "copy": "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r{b}], 64; @%p1 cp.async.bulk.shared::cluster.global"
    ".mbarrier::complete_tx::bytes [%r4], [%d0], 64, [%r{b}];",
    "bar": "bar.sync {b}, 64;",
    "come": "bar.arrive {b}, 64;",
    "flag": "@%p1 atom.shared.add.u32 %r7, [%r2+128], 1;",
    "poll": "P{at}: atom.shared.or.b32 %r7, [%r2+128], 0; setp.eq.u32 %p7, %r7, 0; @%p7 bra P{at};",
}
"""By word, what a step does: `wait2:1` waits at mbarrier 2 for parity 1, `bar1` and `come1` are for barrier 1."""


def code(*warps: str) -> str:
    """PTX in which each warp runs its own steps."""
    text = ""
    for warp, steps in enumerate(warps):
        text += f"setp.ne.u32 %p6, %r5, {warp}; @%p6 bra E{warp}; "
        for place, step in enumerate(steps.split()):
            word, parity = step.rstrip("0123456789:"), step.partition(":")[2]
            text += STEPS[word].format(at=f"{warp}_{place}", b=step[len(word) : len(word) + 1], parity=parity)
        text += f"E{warp}: "
    return text + "bar.sync 0; mov.u32 %r1, 0;"


RING = "wait3:{0} arrive2 ", "wait2:{1} arrive3 "
"""A turn of a producer and a turn of a consumer."""


@pytest.mark.parametrize(
    ("counts", "warps", "rule", "words"),
    [
        ((1, 1), [step.format(1, 0) + step.format(0, 1) + step.format(1, 0) for step in RING], "", ""),
        # The producer does not wait until the consumer has taken the first turn.
        ((1, 1), ["bar1 wait2:0", "arrive2 bar1 arrive2"], "mbarrier-phase", "has looked"),
        ((1, 1), ["arrive2 bar1 arrive2", "wait2:0 bar1 wait2:1"], "", ""),
        # Two warps arrive in a turn and one of them waits: the other may arrive twice in one turn.
        (
            (2, 1),
            ["arrive2 wait2:0 arrive2 wait2:1", "arrive2 arrive2"],
            "mbarrier-phase",
            "may count in the phase before",
        ),
        ((2, 1), ["arrive2 wait2:0 arrive2 wait2:1", "arrive2 wait2:0 arrive2"], "", ""),
        ((2, 1), ["arrive2 wait2:0 flag", "arrive2 poll arrive2"], "", ""),  # a flag in memory orders them
        ((1, 1), ["arrive2", "ask2:0 arrive2 wait2:1"], "mbarrier-phase", "may count in the phase before"),
        ((1, 1), ["arrive2", "wait2:0 arrive2 wait2:1"], "", ""),
        # A second copy may bring its bytes in the phase of the first.
        ((1, 1), ["copy2 wait2:0 copy2 wait2:1", ""], "", ""),
        ((1, 1), ["bar1 wait2:0", "copy2 wait2:0 bar1 copy2 wait2:1"], "mbarrier-phase", "has looked"),
        ((1, 1), ["wait3:1 copy2 wait3:0 copy2", "wait2:0 arrive3 wait2:1"], "", ""),
        # Another warp arrives, and the phase may end before it expects its bytes.
        ((1, 1), ["expect2", "arrive2"], "mbarrier-phase", "wait for bytes"),
        ((1, 1), ["expect2 bar1", "bar1 arrive2"], "", ""),
        # Three warps at a barrier of two: the third may come in the place of the second.
        ((1, 1), ["bar1 bar1", "bar1", "bar1"], "barrier", "in the barrier's round before"),
        ((1, 1), ["bar1 bar2 bar1", "bar1", "bar2 bar1"], "", ""),
        ((1, 1), ["bar1 bar1 bar2", "come1 come1 bar2"], "barrier", "in the barrier's round before"),
        ((1, 1), ["come1 bar2 come1", "bar1 bar2 bar1"], "", ""),
    ],
)
def test_what_another_order_would_break_is_found(
    counts: tuple[int, int], warps: list[str], rule: str, words: str
) -> None:
    body = SET_UP.format(*counts) + code(*warps)
    findings = launch(body, declared=SHARED, block=32 * len(warps))[1].findings
    assert {finding.rule for finding in findings} == ({rule} if rule else set()), findings
    assert all(words in finding.text and finding.other_instruction for finding in findings), findings

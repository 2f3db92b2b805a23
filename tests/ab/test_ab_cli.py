"""`rooflab ab` as its user sees it, the judgement of the self-test, and `compare`."""

import pytest
from junitparser import JUnitXml

from rooflab.bench.ab import output
from rooflab.bench.ab.ab_run import AbResult
from rooflab.bench.ab.pairs import AbSettings
from rooflab.bench.ab.self_test import SelfTest
from rooflab.bench.ab.sides import Comparison, Side
from rooflab.bench.ab.verdict import Evidence, Outcome, Rules, judge, load_floors, remember_floors

TWO = ("rmsnorm", "--kernel", "naive", "--kernel", "library")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("rmsnorm", "--kernel", "naive"), "kernel"),
        (("--base", "HEAD", "--self-test"), "ab"),
        (("rmsnorm", "--head", "HEAD"), "head"),
        (("--records", "results/cpu"), "records"),
        (("gemm", "--records", "a", "--records", "b", "--case", "M=1"), "records"),
        (("--base", ""), "base"),
        (("--base", "HEAD", "--kernel", "mine.py"), "kernel"),
        ((*TWO, "--threshold", "7"), "threshold"),
        ((*TWO, "--threshold", "nan"), "threshold"),
        ((*TWO, "--floor-us", "-1"), "floor-us"),
        ((*TWO, "--budget", "0"), "budget"),
        ((*TWO, "--pairs", "0"), "pairs"),
        (("--self-test", "--repeats", "0"), "repeats"),
        (("--self-test", "--inject", "nan"), "inject"),
        (("--self-test", "--kernel-seconds", "inf"), "kernel-seconds"),
        (("nothing", "--kernel", "naive", "--kernel", "library"), "op"),
    ],
)
def test_bad_usage_is_one_sentence_and_status_2(rooflab, arguments, named):
    status, _, err = rooflab("ab", *arguments)
    assert status == 2 and err.removeprefix("rooflab: ").removeprefix("--").startswith(f"{named}: expected "), err
    assert len(err.strip().splitlines()) == 1


def outcomes(**ratios):
    evidence = [
        Evidence(key, first=((1e-3, ratio * 1e-3),) * 12, second=((1e-3, ratio * 1e-3),) * 12)
        for key, ratio in ratios.items()
    ]
    return judge(evidence, Rules())


def test_junit_and_markdown_say_what_the_table_says(tmp_path):
    found = [*outcomes(same=1.0, slow=1.1), Outcome("gone", "MISSING", "removed or | renamed")]
    found += [Outcome("open", "UNRESOLVED", "noise"), Outcome("blind", "UNRESOLVED", "too few", pairs=3, unseen=True)]
    for strict, failures in ((False, 1), (True, 2)):
        output.write_junit(tmp_path / "deep" / "ab.xml", found, strict=strict)
        suite = next(iter(JUnitXml.fromfile(str(tmp_path / "deep" / "ab.xml"))))
        assert (suite.tests, suite.failures, suite.errors) == (5, failures, 2)
    output.write_markdown(tmp_path / "ab.md", "base against head", found, ["a note"])
    text = (tmp_path / "ab.md").read_text()
    assert "**1 MISSING, 1 SLOWER, 2 UNRESOLVED, 1 SAME**" in text and "- a note" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[1] for row in rows] == ["MISSING", "SLOWER", "UNRESOLVED", "UNRESOLVED", "SAME"]
    assert "removed or \\| renamed" in rows[0] and "+10.0%" in rows[1]
    output.write_markdown(tmp_path / "long.md", "t", outcomes(**{f"k{n}": 1 + n / 100 for n in range(14)}), [])
    shown, folded = (tmp_path / "long.md").read_text().split("<details><summary>4 more</summary>")
    assert (shown.count("| `k"), folded.count("| `k")) == (10, 4) and "`k13`" in shown, "the largest effects"


def result(found):
    side = Side("A", {})
    return AbResult(Comparison(side, side), AbSettings(), tuple(found), {}, [])


def self_tested(same, slowed, floor=0.01):
    return SelfTest((result(same),), result(slowed), 0.2, dict.fromkeys(("k", "slow"), floor))


def test_a_self_test_fails_on_whatever_is_called_wrongly():
    right, slow = outcomes(k=1.0), outcomes(slow=1.2)
    assert self_tested(right, slow).faults == []
    assert "A against A is called SLOWER" in self_tested(outcomes(k=1.1), slow).faults[0]
    assert "A against A is called FASTER" in self_tested(outcomes(k=0.9), slow).faults[0]
    assert "slowed by 20% and called SAME" in self_tested(right, outcomes(slow=1.0)).faults[0]
    assert "slowed by 20% and called FASTER" in self_tested(right, outcomes(slow=0.9)).faults[0]
    unresolved = [Outcome("slow", "UNRESOLVED", "noise")]
    assert "at a floor of 1.0%" in self_tested(right, unresolved).faults[0]
    assert self_tested(right, unresolved, floor=0.08).faults == []  # the machine is too noisy for it, and says so
    assert "FAILED: it broke" in self_tested([Outcome("k", "FAILED", "it broke")], slow).faults[0]


def test_the_noise_floor_is_remembered_for_each_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path))
    assert load_floors("here") == {}
    for ratio in (1.004, 0.99, 1.006):
        remember_floors("here", outcomes(k=ratio))
    assert load_floors("here")["k"] == pytest.approx(0.01, rel=1e-3)  # few: the widest bound
    remember_floors("here", [*outcomes(k=1.05), *outcomes(k=1.0), Outcome("k", "FAILED", "no effect")])
    assert load_floors("here")["k"] == pytest.approx(0.042, rel=1e-2)  # five: the 95th percentile
    assert load_floors("elsewhere") == {}
    remember_floors("here", outcomes(k=1.0) * 50)
    assert load_floors("here")["k"] == pytest.approx(0, abs=1e-9), "the last 50 count"

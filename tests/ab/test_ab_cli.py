"""`rooflab ab` as its user meets it, the self-test's own judgement, and `compare`."""

import pytest
from junitparser import JUnitXml

from rooflab.bench.ab import output
from rooflab.bench.ab.pairs import AbSettings
from rooflab.bench.ab.run import AbResult
from rooflab.bench.ab.self_test import SelfTest
from rooflab.bench.ab.sides import Comparison, Side
from rooflab.bench.ab.verdict import Evidence, Outcome, Rules, judge, load_floors, remember_floors

TWO = ("rmsnorm", "--kernel", "naive", "--kernel", "library")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        (("rmsnorm", "--kernel", "naive"), "kernel: expected one op and two kernels"),
        (("--base", "HEAD", "--self-test"), "ab: expected one of --base, --records and --self-test"),
        (("rmsnorm", "--head", "HEAD"), "head: expected --base"),
        (("--records", "results/cpu"), "records: expected two files or folders"),
        (("gemm", "--records", "a", "--records", "b", "--case", "M=1"), "records: expected no op and no --case beside"),
        (("--records", "a", "--records", "b", "--suite", "smoke", "--scheme", "fp32"), "records: expected no --scheme"),
        pytest.param(
            ("--base", "no-such-revision"),
            "revision: expected a commit, branch or tag",
            marks=pytest.mark.needs("checkout"),
        ),
        (("--base", ""), "base: expected a revision, got ''"),
        (("--base", "HEAD", "--head", " "), "head: expected a revision, got ' '"),
        (("--base", "HEAD", "--kernel", "mine.py"), "kernel: expected a file in a git repository, got 'mine.py'"),
        *(((*TWO, "--threshold", wrong), "threshold: expected a ratio") for wrong in ("7", "0", "nan")),
        ((*TWO, "--floor-us", "-1"), "floor-us: expected 0 or more"),
        ((*TWO, "--budget", "0"), "budget: expected a positive"),
        ((*TWO, "--pairs", "0"), "pairs: expected at least 1, got 0"),
        (("--self-test", "--repeats", "0"), "repeats: expected at least 1"),
        (("--self-test", "--inject", "-3"), "inject: expected a share of the time above 0 and up to 10, got -3"),
        (("--self-test", "--inject", "nan"), "inject: expected a share of the time above 0 and up to 10, got nan"),
        *(
            (("--self-test", "--kernel-seconds", wrong), "kernel-seconds: expected a positive")
            for wrong in ("inf", "-1")
        ),
        (("nothing", "--kernel", "naive", "--kernel", "library"), "op: expected one of"),
    ),
)
def test_bad_usage_is_one_sentence_and_status_2(rooflab, arguments, sentence):
    status, _, err = rooflab("ab", *arguments)
    assert status == 2 and err.removeprefix("rooflab: ").removeprefix("--").startswith(sentence), err
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
    output.write_junit(tmp_path / "deep" / "ab.xml", found, strict=False)
    suite = next(iter(JUnitXml.fromfile(str(tmp_path / "deep" / "ab.xml"))))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (5, 1, 2, 1)
    output.write_junit(tmp_path / "strict.xml", found, strict=True)
    assert next(iter(JUnitXml.fromfile(str(tmp_path / "strict.xml")))).failures == 2
    output.write_markdown(tmp_path / "ab.md", "base against head", found, ["a note"])
    text = (tmp_path / "ab.md").read_text()
    assert "**1 MISSING, 1 SLOWER, 2 UNRESOLVED, 1 SAME**" in text and "- a note" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[1] for row in rows] == ["MISSING", "SLOWER", "UNRESOLVED", "UNRESOLVED", "SAME"]
    assert "removed or \\| renamed" in rows[0] and "+10.0%" in rows[1]
    drawn = text[text.index("```text") : text.rindex("```")].splitlines()[1:]
    assert [line.split()[-2:] for line in drawn] == [["+10.0%", "slow"], ["+0.0%", "same"], ["0", "+10.0%"]]
    assert drawn[0].index("o") == 40 and drawn[1].index("o") == 20, "the largest effect reaches the edge"
    output.write_markdown(tmp_path / "long.md", "t", outcomes(**{f"k{n}": 1 + n / 100 for n in range(14)}), [])
    long = (tmp_path / "long.md").read_text()
    shown, folded = (part.count("| `k") for part in long.split("<details><summary>4 more</summary>\n\n| comp"))
    assert (shown, folded) == (10, 4) and "`k13`" in long.split("<details>")[0]
    assert not list(tmp_path.rglob("*.part"))


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

"""The page as text: it fetches nothing, text is escaped, every link has a target; and the command that writes it."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic import KEY, SCRIPT, benches, write_synthetic

from rooflab.bench.core.record_files import write
from rooflab.bench.report.page import write_report
from rooflab.roofline.numbers import times

CPU_RECORDS = Path(__file__).parents[2] / "results" / "cpu"
VOID = {"meta", "link", "img", "br", "wbr"}


class Page(HTMLParser):
    """Tags, attributes and text of a page, and whether they nest."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open, self.broken = [], [], [], []
        self.feed(text)
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.broken.append(tag)

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]

    def values(self, *names):
        """The values of an attribute of one of the names, in every tag."""
        return [value for _, attrs in self.tags for name, value in attrs.items() if name in names]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What was written, and the page as text and as tags."""
    folder = tmp_path_factory.mktemp("page")
    paths = [write_synthetic(folder / "records"), CPU_RECORDS]
    report = write_report(paths, folder / "report.html", f"A & B {SCRIPT}")
    text = (folder / "report.html").read_text()
    return report, text, Page(text)


def test_a_name_that_is_a_script_is_only_text(written):
    _, _, page = written
    assert page.broken == [] and page.open == [] and page.all("script") == []
    assert page.text.count(SCRIPT) >= 4, "the kernel's name and its reason are shown as they are"
    assert f"A & B {SCRIPT}" in page.text


def test_nothing_is_fetched_every_link_lands_and_no_name_is_used_twice(written):
    _, text, page = written
    addresses = page.values("src", "href", "action")
    assert addresses and all(value.startswith(("#", "data:")) for value in addresses)
    assert not re.search(r"url\(|@import|@font-face", text.partition("<body")[0])
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none';") and "http" not in policy and "connect-src" not in policy
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    wanted = {attrs["href"][1:] for attrs in page.all("a")} | {*page.values("popovertarget", "aria-labelledby")}
    assert wanted <= set(ids) and len(wanted) > 100


def test_the_page_shows_what_the_content_says(written):
    report, _, page = written
    shown = [one["reason"] for one in report["content"].problems]
    shown += [times(over["mean"]) for one in report["content"].standings if (over := one["over_library"])]
    shown += ["none: an interpreter's time is not a kernel's", "software power cap", "164 kB"]
    assert [text for text in (*shown, "warp_specialize was asked for and ignored") if text not in page.text] == []
    wrong = page.text.index(f"{len(report['content'].problems)} problems:")
    assert wrong < page.text.index("Best: the fastest optimized kernel")


def test_noise_is_not_wrong_and_what_did_not_run_or_has_no_record_is_folded_and_said_once(tmp_path):
    refused = {"kernel": "cluster", "status": "UNSUPPORTED", "reason": "needs sm90, found sm80", "basis": "bound"}
    refused |= dict.fromkeys(("latency_median_ms", "latency_p20_ms", "latency_p80_ms"))
    made = [one for one in benches(schemes=("bf16",), ops=("rmsnorm",)) if one.kernel in ("naive", "library", "fused")]
    fused = [one for one in made if one.kernel == "fused"]
    made = [one for one in made if one.kernel != "fused"] + [replace(one, **refused) for one in fused]
    made += [replace(one, status="NOISY", reason="the threads waited") for one in fused]
    write(tmp_path / "made.jsonl", *made)
    content = write_report([tmp_path], tmp_path / "report.html")["content"]
    assert content.problems == () and {one["name"] for one in content.noisy} == {"rmsnorm/fused"}
    assert [one["kernels"] for one in content.standings] == [("library",)], "no ratio is made of noise"
    page = Page((tmp_path / "report.html").read_text())
    assert "No problem. 3 NOISY" in page.text and "µs: the threads waited" in page.text
    assert not {"bad", "failed"} & {word for words in page.values("class") for word in (words or "").split()}
    assert page.text.count("needs sm90, found sm80") == 2, "once for the op, and once for the machine"
    assert page.text.count("NO RECORD:") == 1 and sum("open" in attrs for attrs in page.all("details")) == 1


def test_the_command_reads_what_bench_wrote_writes_a_file_and_says_the_same_as_json(rooflab, tmp_path):
    write(tmp_path / ".rooflab" / "deep" / "made.jsonl", *benches(schemes=("bf16",), ops=("rmsnorm",)))
    status, out, _ = rooflab("report", "--out", "new/page.html", "--json")
    found, content = json.loads(out), json.loads(out)["content"]
    assert (status, found["file"], found["figures"]) == (0, "new/page.html", 1)
    assert found["bytes"] == (tmp_path / "new" / "page.html").stat().st_size
    assert "<h1>Rooflab report</h1>" in (tmp_path / "new" / "page.html").read_text()
    assert content["files"][0]["name"] == ".rooflab/deep/made.jsonl"
    assert content["records"] == content["files"][0]["records"] and content["standings"][0]["machine"] == KEY
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"], "no temporary file is left"

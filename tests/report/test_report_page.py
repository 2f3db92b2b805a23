"""The page as text: nothing that fetches, nothing unescaped, every link lands, and the command that writes it."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report_synthetic import KEY, SCRIPT, benches, write_synthetic

from rooflab.bench.core.record_files import write
from rooflab.bench.report.ledgers import COLOURS
from rooflab.bench.report.page import write_report
from rooflab.roofline.numbers import times

CPU_RECORDS = Path(__file__).parents[2] / "results" / "cpu"
STYLE = (Path(write_report.__code__.co_filename).parent / "_style.html").read_text()
VOID = {"meta", "link", "img", "br", "wbr"}


class Page(HTMLParser):
    """Tags, attributes and text of a page, and whether they nest."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open, self.broken = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.broken.append(tag)

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def light(records, tmp_path_factory):
    """The page, and what it says."""
    out = tmp_path_factory.mktemp("light") / "report.html"
    written = write_report([records, CPU_RECORDS], out, f"A & B {SCRIPT}")
    return written, Page(out.read_text())


def test_a_name_that_is_a_script_is_only_text(light):
    _, page = light
    assert page.broken == [] and page.open == []
    assert page.all("script") == [], "the page has no script, so what a record holds is none either"
    text = "".join(page.texts)
    assert text.count(SCRIPT) >= 4, "the kernel's name and its reason are shown as they are"
    assert f"A & B {SCRIPT}" in text


def test_nothing_is_fetched_every_link_lands_and_no_name_is_used_twice(light):
    _, page = light
    addresses = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "action")]
    assert addresses and all(value.startswith(("#", "data:")) for value in addresses)
    assert not re.search(r"url\(|@import|@font-face", STYLE)
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none';") and "http" not in policy and "connect-src" not in policy
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    wanted = {attrs["href"][1:] for attrs in page.all("a")} | {attrs["popovertarget"] for attrs in page.all("button")}
    wanted |= {attrs["aria-labelledby"] for _, attrs in page.tags if "aria-labelledby" in attrs}
    assert wanted <= set(ids) and len(wanted) > 100


def test_tables_and_headings_can_be_read_by_a_machine(light):
    _, page = light
    assert page.all("html")[0]["lang"] == "en"
    assert all(attrs.get("scope") in ("col", "row", "rowgroup") for attrs in page.all("th"))
    boxes = [attrs for attrs in page.all("div") if attrs.get("class") == "box"]
    assert len(boxes) == len(page.all("table")) + len(page.all("img")), "every table scrolls inside a box of its own"
    assert all(box["tabindex"] == "0" and ("aria-label" in box or "aria-labelledby" in box) for box in boxes)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False)), "no level is left out"


def test_the_page_shows_what_the_content_says(light):
    written, page = light
    text = " ".join("".join(page.texts).split())
    for problem in written.content.problems:
        assert problem.reason in text and problem.status in text
    for standing in written.content.standings:
        if standing.over_library:
            assert times(standing.over_library.mean) in text
    for word in (
        "none: an interpreter's time is not a kernel's",
        "no end after 60 s",
        "software power cap",
        "164 kB",
        "warp_specialize was asked for and ignored",
    ):
        assert word in text
    assert text.index(f"{len(written.content.problems)} wrong:") < text.index("Best: the fastest optimized kernel")


def test_noise_is_not_wrong_and_what_did_not_run_or_has_no_record_is_folded_and_said_once(tmp_path):
    noisy = {"status": "NOISY", "reason": "the threads waited"}
    refused = {"kernel": "cluster", "status": "UNSUPPORTED", "reason": "needs sm90, found sm80", "basis": "bound"}
    refused |= dict.fromkeys(("latency_median_ms", "latency_p20_ms", "latency_p80_ms"))
    made = [one for one in benches(schemes=("bf16",), ops=("rmsnorm",)) if one.kernel in ("naive", "library", "fused")]
    made += [replace(one, **refused) for one in made if one.kernel == "fused"]
    made = [replace(one, **noisy) if one.kernel == "fused" else one for one in made]
    write(tmp_path / "made.jsonl", *made)
    written = write_report([tmp_path], tmp_path / "report.html")
    assert written.content.problems == () and {one.name for one in written.content.noisy} == {"rmsnorm/fused"}
    assert [one.kernels for one in written.content.standings] == [("library",)], "no ratio is made of noise"
    page = Page((tmp_path / "report.html").read_text())
    text = " ".join("".join(page.texts).split())
    assert "Nothing is wrong. 3 NOISY" in text and re.search(r"NOISY [\d.]+ µs: the threads waited", text)
    assert not [attrs for _, attrs in page.tags if {"bad", "failed"} & set((attrs.get("class") or "").split())]
    assert text.count("needs sm90, found sm80") == 2, "once for the op, and once for the machine"
    assert text.count("NO RECORD:") == 1 and [attrs for attrs in page.all("details") if "open" in attrs] == [
        {"open": None}
    ]


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_a_white_and_from_a_dark_page():
    themes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.S)
    ]
    assert len(themes) == 3
    for theme in themes:
        for name in ("ink", "soft", "link", "good", "bad", "warn"):
            for page in ("page", "head", "bad-page"):
                assert contrast(theme[name], theme[page]) >= 4.5, (name, page, theme)
        assert contrast(theme["ink"], theme["bar"]) >= 4.5
    for colour in COLOURS:
        assert min(contrast(colour, themes[0]["page"]), contrast(colour, themes[1]["page"])) >= 3, colour


def test_the_command_writes_a_file_and_says_the_same_as_json(rooflab, records, tmp_path):
    status, text, _ = rooflab("report", records, "--title", "Ours", "--out", "new/page.html")
    assert status == 0 and "new/page.html" in text and "gemm/hangs" in text and "TIMEOUT" in text
    assert "<h1>Ours</h1>" in (tmp_path / "new" / "page.html").read_text()
    status, out, _ = rooflab("report", records, "--title", "Ours", "--out", "new/page.html", "--json")
    found = json.loads(out)
    assert status == 0 and found["file"] == "new/page.html" and found["figures"] == 1
    assert found["bytes"] == (tmp_path / "new" / "page.html").stat().st_size
    assert found["content"]["records"] == sum(file["records"] for file in found["content"]["files"])
    assert found["content"]["standings"][0]["machine"] == KEY
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"], "no temporary file is left"


def test_without_a_path_it_reads_what_bench_wrote(rooflab, tmp_path):
    (tmp_path / ".rooflab" / "deep").mkdir(parents=True)
    lines = [record.to_json() for record in benches(schemes=("bf16",), ops=("rmsnorm",))]
    (tmp_path / ".rooflab" / "deep" / "made.jsonl").write_text("\n".join(lines) + "\n")
    status, out, _ = rooflab("report", "--json")
    assert status == 0 and json.loads(out)["content"]["files"][0]["name"] == ".rooflab/deep/made.jsonl"
    assert (tmp_path / "report.html").is_file()


def test_bad_input_is_one_sentence_status_2_and_no_file(rooflab, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"kind": "bench"\n')
    for arguments, message in (
        (["nowhere"], "rooflab: records: expected a file or folder, got 'nowhere'"),
        (["bad.jsonl"], "rooflab: bad.jsonl, line 1: "),
        ([CPU_RECORDS, "--out", "."], "rooflab: --out: expected a file, got the folder '.'"),
        ([CPU_RECORDS, "--title", " "], "rooflab: --title: expected a text, got an empty one"),
    ):
        status, out, err = rooflab("report", *arguments)
        assert status == 2 and out == "" and "Traceback" not in err
        assert [line for line in err.splitlines() if line.startswith("rooflab: ")][0].startswith(message)
        assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]

"""The figures and the pages of ladders: their numbers are those of the record, which the emulator makes again."""

import copy
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from learn import ladders
from learn import levels as counts

from rooflab.bench.learn.drawing import WORDS, facts_of_kernel, figures, from_l2, hbm
from rooflab.bench.learn.learn_data import load
from rooflab.bench.learn.sketch import COLOURS, file_of, size
from rooflab.reference.spec import Case

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/ladders"


@pytest.fixture(scope="module")
def data():
    return load()


@pytest.fixture(scope="module")
def drawn(data):
    return figures(data)


def test_pages_and_drawings_are_what_the_script_writes(data, drawn):
    written = {f"{name}.md": ladders.page_of(words, data) for name, words in ladders.WORDS.items()}
    for figure in drawn.values():
        files = [file_of(state.svg, state.label) for state in figure.states]
        written |= {f"{figure.name}-{n}.svg": text for n, text in enumerate(files, 1)}
    assert {path.name: path.read_text() for path in PAGES.iterdir()} == written
    assert all(text.count("\n") <= 120 for name, text in written.items() if name.endswith(".md"))


@pytest.mark.parametrize("page", ladders.WORDS)
def test_the_numbers_of_a_page_are_the_record_s(page, data):
    text = (PAGES / f"{page}.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| [`")]
    cases = [one for op in ladders.WORDS[page]["ops"] for one in data["levels"]["ops"][op]]
    kernels = [kernel for one in cases for kernel in one["kernels"]]
    for (name, saves, *cells), kernel in zip(rows, kernels, strict=True):
        assert f"`{kernel['name']}`" in name and f"({'../../' + kernel['code']})" in name and saves
        assert [cell.lstrip("~") for cell in cells[:2]] == [size(hbm(kernel)), size(from_l2(kernel))]
        assert (kernel["basis"] == "modelled") == cells[0].startswith("~") == (cells[2] == "not seen")


def test_a_changed_number_changes_the_figure_and_the_page(data, drawn):
    changed = copy.deepcopy(data)
    naive = changed["levels"]["ops"]["flash_attention"][0]["kernels"][0]
    naive["hbm_read_bytes"] += 10**12
    assert figures(changed)["attention_scores"] != drawn["attention_scores"]
    words = ladders.WORDS["flash_attention"]
    assert ladders.page_of(words, changed) != ladders.page_of(words, data)
    naive["name"] = "renamed"
    with pytest.raises(ValueError, match="expected the kernel naive of flash_attention at B=1,.*, got none"):
        figures(changed)


def test_a_drawing_is_well_formed_and_speaks_without_colours(drawn):
    assert drawn.keys() == WORDS.keys() and len(drawn) == 9
    for state in (state for figure in drawn.values() for state in figure.states):
        for svg in (state.svg, file_of(state.svg, state.label)):
            root = ElementTree.fromstring(svg)
            assert root.get("role") == "img" and all(root.find(f"{{*}}{tag}").text for tag in ("title", "desc"))
            assert float(root.get("font-size")) >= 13 and root.findall("{*}text"), "12 px on a screen of 360 px"
        assert "{" not in state.text and set(re.findall(r"var\(--(\w+),", state.svg)) <= COLOURS.keys()


def test_attention_s_counts_are_those_of_the_recorded_picture(data):
    (file,) = (ROOT / "results/attention").glob("*.jsonl")
    for record in map(json.loads, file.read_text().splitlines()):
        own = facts_of_kernel(data["levels"], "flash_attention", record["kernel"])
        assert hbm(own) == record["traffic_bytes"] and own["launches"] == record["metrics"]["launches"]


@pytest.mark.more
def test_the_emulator_counts_a_kernel_of_the_record_again(data):
    (case,) = data["levels"]["ops"]["silu_and_mul"]
    again = counts.case_of("silu_and_mul", Case(**case["sizes"]).id, ["naive", "fused"], case["why"])
    assert again["kernels"] == case["kernels"][:2] and again["least_bytes"] == case["least_bytes"]

"""The frame of `rooflab learn`: what each section has, sizes, links, commands, records, access, screens."""

import json
import re
import runpy
import shlex
import shutil
from html import unescape
from pathlib import Path

import pytest
import typer
from pages import words_of

from rooflab.bench.cli.app import app
from rooflab.bench.learn.learn_data import DATA_FOLDER, FOLDER, glossary, load, packed
from rooflab.bench.learn.learn_page import render

ROOT = Path(__file__).parents[2]
SECTIONS = {path.stem: path.read_text() for path in sorted((FOLDER / "sections").glob("*.html"))}


@pytest.fixture(scope="module")
def html():
    return render()


def prose(text):
    """The paragraphs and list items of a text, without the macros in them."""
    plain = re.sub(r"{[{%].*?[%}]}", " ", text, flags=re.DOTALL)
    return " ".join(re.findall(r"<(?:p|li)\b[^>]*>(.*?)</(?:p|li)>", plain, re.DOTALL))


def test_each_of_the_21_sections_has_its_parts_and_fits_on_a_screen():
    assert [int(name[:2]) for name in SECTIONS] == list(range(1, 22))
    for name, text in SECTIONS.items():
        counts = [len(re.findall(rf"\bm\.{part}\(", text)) for part in ("section", "widget", "predict", "exercise")]
        assert counts == [1, 1, 1, 1] and "m.evidence(" in text and "m.unseen(" in text, name
        assert 30 < len(re.sub(r"<.*?>", "", prose(text)).split()) < 260, name


def test_each_widget_is_used_once_and_lies_in_a_file_of_its_name():
    used = re.findall(r'm\.widget\("(\w+)"', "".join(SECTIONS.values()))
    assert sorted(used) == sorted(path.stem for path in (FOLDER / "widgets").glob("*.js")) and len(set(used)) == 21


def test_a_term_is_defined_at_its_first_use():
    """`m.term` stands once for each term, and no earlier sentence has the word."""
    whole = "".join(SECTIONS.values())
    used = re.findall(r'm\.term\("([^"]+)"', whole)
    assert sorted(used) == sorted(glossary()) and len(used) > 40
    for term in used:
        before = prose(whole[: whole.index(f'm.term("{term}"')])
        assert not re.search(rf"\b{re.escape(term)}s?\b", before) or term in ("token", "model"), term


def test_the_page_and_what_the_wheel_carries_of_it_are_small(html):
    sizes = {name: len(packed(content)) for name, content in load().items()}
    assert len(html.encode()) <= 2_000_000
    assert len(html.encode()) - sizes["vocabulary"] - sizes["attention"] <= 700_000
    assert (
        sum(path.stat().st_size for path in FOLDER.rglob("*") if path.suffix in (".js", ".css", ".json", ".gz")) < 1.2e6
    )


def test_templates_are_short():
    for path in (path for path in FOLDER.rglob("*") if path.suffix in (".html", ".js", ".css")):
        lines = path.read_text().splitlines()
        assert len(lines) <= 300 and max(map(len, lines)) <= 120, path.name


def test_each_link_has_a_target_and_each_path_is_a_file(html):
    names = set(re.findall(r'\bid="([^"]+)"', html))
    assert set(re.findall(r'href="#([^"]+)"', html)) <= names
    assert all(link.startswith("https://") for link in re.findall(r'href="([^#"d][^"]*)"', html))
    paths = re.findall(r"<code>((?:bench|docs|engine|kernels|reference|results|roofline)/[\w/.]*)</code>", html)
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path).exists()] == []


COMMANDS = sorted(set(re.findall(r'class="evidence">Made by <code>(.*?)</code>', unescape(render()))))


def test_each_command_is_one_that_we_take():
    commands = typer.main.get_command(app).commands
    for command in COMMANDS:
        words = words_of(command)
        if words[0] == "rooflab":
            commands[words[1]].make_context(words[1], words[2:])
        else:
            assert words[0] == "python" and (ROOT / words[1]).is_file(), command
    assert len(COMMANDS) > 4


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("rooflab")])
def test_each_command_runs(command, rooflab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = rooflab(*shlex.split(command)[1:])
    assert status in (0, 13) and out, err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topic", ["inside", "serving", "levels"])
def test_the_script_that_the_sections_name_makes_their_records(topic, tmp_path, monkeypatch):
    """Minutes each, and ten for `levels`."""
    monkeypatch.setattr("rooflab.bench.learn.learn_data.DATA_FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["make.py", topic])
    monkeypatch.syspath_prepend(ROOT / "results" / "learn")
    runpy.run_path(str(ROOT / "results/learn/make.py"), run_name="__main__")
    made, shown = load(tmp_path), load()
    assert made and all(shown[name].keys() == content.keys() for name, content in made.items())


def test_a_changed_record_changes_the_page(tmp_path, html):
    shutil.copytree(DATA_FOLDER, tmp_path / "data")
    run = json.loads((tmp_path / "data" / "run.json").read_text())
    (tmp_path / "data" / "run.json").write_text(json.dumps(run | {"itl_ms": 12345.0}))
    changed = render(tmp_path / "data")
    assert "12,345" in changed and "12,345" not in html
    (tmp_path / "data" / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json: expected JSON"):
        render(tmp_path / "data")


DESKTOP = {"viewport": {"width": 1440, "height": 900}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
browser = [pytest.mark.more, pytest.mark.needs("browser")]


class TestBrowser:
    pytestmark = browser

    @pytest.mark.parametrize(("device", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
    def test_axe_finds_no_violation_and_nothing_scrolls_sideways(self, open_page, device, scheme):
        from axe_playwright_python.sync_playwright import Axe

        page = open_page(color_scheme=scheme, **device)
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert sizes[0] <= sizes[1]
        small = "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize)))"
        assert page.locator("main p, main td, main th, main button, main label").evaluate_all(small) >= 12
        page.context.close()

    def test_the_keyboard_reaches_everything(self, open_page):
        page = open_page(reduced_motion="reduce", **DESKTOP)
        stops = (
            "[...document.querySelectorAll('a[href], button, input, select, textarea, summary')]"
            ".filter(one => one.checkVisibility() && !one.disabled)"
        )
        count = page.evaluate(f"{stops}.length")
        page.evaluate("window.reached = new Set(); document.addEventListener('focusin', e => reached.add(e.target))")
        for _ in range(count + 150):  # boxes that scroll have a place too
            page.keyboard.press("Tab")
        missed = page.evaluate(f"{stops}.filter(one => !reached.has(one)).map(one => one.outerHTML.slice(0, 90))")
        assert count > 150 and missed == []
        assert page.evaluate("document.getAnimations().length") == 0
        page.context.close()

    def test_a_prediction_is_judged_once_and_its_reason_shown(self, page):
        field = page.locator(".predict").first
        right = int(field.get_attribute("data-right"))
        wrong = 1 if right == 0 else 0
        assert not field.locator(".because").is_visible()
        field.locator("button").nth(wrong).press("Enter")
        assert "No: it is" in field.inner_text() and field.locator(".because").is_visible()
        field.locator("button").nth(right).press("Enter")
        assert "Right." in field.inner_text()
        assert page.locator("[data-widget=recap] output").inner_text().startswith("0 of 1 right")

    def test_a_term_and_a_figure_open_by_keyboard(self, page):
        term = page.locator("button.term").first
        term.press("Enter")
        assert page.locator("[popover]:popover-open").inner_text().startswith(f"{term.inner_text()}: ")
        page.keyboard.press("Escape")
        figure = page.locator("figure.states").first
        figure.locator(".buttons button").nth(1).press("Enter")
        assert [figure.locator(".state").nth(i).is_visible() for i in (0, 1)] == [False, True]

    def test_without_javascript_text_and_answers_are_there(self, open_page, learn_file):
        page = open_page(widgets=False, java_script_enabled=False)
        assert page.locator("main section").count() == 23
        page.context.close()

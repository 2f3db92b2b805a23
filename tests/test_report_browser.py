"""The report in headless Chromium: offline, on a desk, a phone, in the dark and on paper."""

import re
from pathlib import Path

import needs
import pytest
from test_report_synthetic import write_synthetic

from rooflab.bench.report.page import write_report

CPU_RECORDS = Path(__file__).parent.parent / "results" / "cpu"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
FIRST = "roofline-1-figure"

pytestmark = [pytest.mark.more, pytest.mark.needs("browser")]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=needs.browser(), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One page of a synthetic GPU and the real CPU, which is two machines: with one thread it has other ceilings."""
    folder = tmp_path_factory.mktemp("report")
    written = write_report([write_synthetic(folder / "records"), CPU_RECORDS], folder / "report.html", "Two machines")
    assert written.figures == 3 and 5e6 < written.bytes < 9e6
    return folder / "report.html", written.content


@pytest.fixture(scope="module")
def visit(browser, report):
    """Opens the page with the network off; fails on a request, a console message of any kind, or an error in it."""
    contexts = []

    def call(viewport, **options):
        context = browser.new_context(viewport=viewport, offline=True, **options)
        contexts.append(context)
        page, heard = context.new_page(), []
        page.on("request", lambda request: heard.append(request.url))
        page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        page.goto(report[0].as_uri())
        page.wait_for_selector(f"#{FIRST} .main-svg")
        asked = [what for what in heard if what != report[0].as_uri() and not what.startswith(("data:", "blob:"))]
        assert asked == []
        return page, heard

    yield call
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def desktop(visit):
    return visit(DESKTOP)[0]


@pytest.fixture(scope="module")
def phone(visit):
    return visit(PHONE, has_touch=True, is_mobile=True)[0]


def point_of(page, word, figure=FIRST):
    """Where on the screen the first shown point lies whose trace has `word` in its name."""
    page.locator(f"#{figure}").scroll_into_view_if_needed()
    return page.evaluate(
        """([id, word]) => {
            const graph = document.getElementById(id), layout = graph._fullLayout, box = graph.getBoundingClientRect();
            const trace = graph._fullData.find(
                t => t.meta === 'kernels' && t.name.includes(word) && t.visible === true);
            const [x, y] = [layout[trace.xaxis.replace('x', 'xaxis')], layout[trace.yaxis.replace('y', 'yaxis')]];
            return [box.x + x._offset + x.d2p(trace.x[0]), box.y + y._offset + y.d2p(trace.y[0])];
        }""",
        [figure, word],
    )


def asked(page, x, y):
    """The texts that show when the pointer comes to rest at a place of the figure."""
    page.mouse.move(x + 80, y + 80)
    page.mouse.move(x, y, steps=3)
    page.wait_for_timeout(200)
    return page.locator(f"#{FIRST} .hovertext").all_text_contents()


def test_the_page_is_whole_and_asks_the_network_nothing(visit):
    page, heard = visit(DESKTOP)
    assert page.title() == "Two machines", "the kernel that is called a script did not run"
    # The policy in the page forbids what it never does, so that no record can make it do so.
    page.evaluate("fetch('https://example.invalid/x').catch(() => null)")
    assert any("Content Security Policy" in what for what in heard)
    buttons = page.locator(".modebar-btn").evaluate_all("all => all.map(one => one.dataset.title)")
    assert len(buttons) == 18 and not [title for title in buttons if re.search("share|cloud|plotly", title, re.I)]


@pytest.mark.parametrize("device, viewport", [("desktop", DESKTOP), ("phone", PHONE)])
def test_it_never_scrolls_sideways_and_every_point_is_drawn(request, report, device, viewport):
    page = request.getfixturevalue(device)
    figure, height = page.locator(f"#{FIRST}").bounding_box(), page.evaluate("document.documentElement.scrollHeight")
    assert height <= {"desktop": 1.6, "phone": 3}[device] * viewport["height"]
    assert device == "phone" or figure["y"] + figure["height"] <= viewport["height"], "it is on the first screen"
    ticks = [page.locator(f"#{FIRST} .{axis}tick").count() for axis in ("y", "y2")]
    assert min(ticks) >= 3, "an axis of rates has three labels"
    assert not page.locator("#unmeasured").is_visible()
    page.locator("a[href='#unmeasured']").click()
    page.locator("summary").last.press("Enter")
    assert page.locator("#unmeasured").is_visible() and page.locator("#records").is_visible()
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.wait_for_timeout(500)
    scroll, client = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert scroll <= client == viewport["width"]
    wide = page.locator(".box").evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).length")
    assert wide > 20 or device == "desktop", "on a phone wide tables scroll in their boxes"
    for number, roofline in enumerate(report[1].rooflines, 1):
        svg = page.locator(f"#roofline-{number}-figure .main-svg").first.bounding_box()
        assert 0 <= svg["x"] and svg["x"] + svg["width"] <= viewport["width"]
        main = sum(place.main for place in roofline.places)
        assert page.locator(f"#roofline-{number}-figure .points path.point").count() >= main > 0
    small = page.locator("main p, main td, main th").evaluate_all(
        "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize)))"
    )
    assert small >= 12


def test_hover_shows_the_facts_of_a_kernel_and_its_record(desktop):
    (text,) = asked(desktop, *point_of(desktop, "sample optimized bf16"))
    assert "sample / cluster" in text and "optimized, cuda" in text
    for word in ("µs (p20", "library (as fast)", "of the bound", "counted", "checked by gpu", "events, cold", "line "):
        assert word in text, text


def test_the_dark_page_is_dark_its_figures_can_be_read_and_paper_is_white(visit):
    page = visit(DESKTOP)[0]  # its own: another test may come after it
    page.emulate_media(color_scheme="dark")
    colour = "one => getComputedStyle(one).{}.match(/\\d+/g).slice(0, 3).map(Number)"
    assert max(page.locator("body").evaluate(colour.format("backgroundColor"))) < 50
    for inside in (
        ".xtick text",
        ".ytick text",
        ".x2tick text",
        ".y2tick text",
        ".legendtext",
        ".updatemenu-item-text",
    ):
        ink = page.locator(f"#{FIRST} {inside}").first.evaluate(colour.format("fill"))
        assert min(ink) > 180, f"{inside} is dark on dark"
    page.emulate_media(media="print", color_scheme="dark")
    assert max(page.locator("body").evaluate(colour.format("color"))) == 0
    assert page.locator(f"#{FIRST} .main-svg").first.is_visible() and not page.locator("nav").is_visible()

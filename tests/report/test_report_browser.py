"""The report in headless Chromium: offline, on a desk, a phone, in the dark and on paper."""

from pathlib import Path

import needs
import pytest
from test_report_synthetic import write_synthetic

from rooflab.bench.report.page import write_report

CPU_RECORDS = Path(__file__).parents[2] / "results" / "cpu"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

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
    assert written.figures == 3 and 5e5 < written.bytes < 4e6
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


def test_the_page_is_whole_and_asks_the_network_nothing(visit):
    page, heard = visit(DESKTOP)
    assert page.title() == "Two machines", "the kernel that is called a script did not run"
    # The policy in the page forbids what it never does, so that no record can make it do so.
    page.evaluate("fetch('https://example.invalid/x').catch(() => null)")
    assert any("Content Security Policy" in what for what in heard)


@pytest.mark.parametrize("device, viewport", [("desktop", DESKTOP), ("phone", PHONE)])
def test_it_never_scrolls_sideways(request, report, device, viewport):
    page = request.getfixturevalue(device)
    figure, height = page.locator("figure").first.bounding_box(), page.evaluate("document.documentElement.scrollHeight")
    assert height <= {"desktop": 1.6, "phone": 3}[device] * viewport["height"]
    assert device == "phone" or figure["y"] + figure["height"] <= viewport["height"], "it is on the first screen"
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
    drawn = page.locator("figure img").evaluate_all(
        "all => all.map(one => [one.complete, one.naturalWidth, one.width])"
    )
    assert len(drawn) == 3 and all(whole and own > 900 and width >= 900 for whole, own, width in drawn)
    small = page.locator("main p, main td, main th").evaluate_all(
        "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize)))"
    )
    assert small >= 12


def test_the_dark_page_is_dark_and_paper_is_white(visit):
    page = visit(DESKTOP)[0]  # its own: another test may come after it
    page.emulate_media(color_scheme="dark")
    colour = "one => getComputedStyle(one).{}.match(/\\d+/g).slice(0, 3).map(Number)"
    assert max(page.locator("body").evaluate(colour.format("backgroundColor"))) < 50
    page.emulate_media(media="print", color_scheme="dark")
    assert max(page.locator("body").evaluate(colour.format("color"))) == 0
    assert page.locator("figure img").first.is_visible() and not page.locator("nav").is_visible()

"""The report in headless Chromium: offline, on wide and narrow screens, in dark mode and on paper."""

from pathlib import Path

import pytest
from synthetic import write_synthetic

from rooflab.bench.report.page import write_report

CPU_RECORDS = Path(__file__).parents[2] / "results" / "cpu"
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}

pytestmark = [pytest.mark.more, pytest.mark.needs("browser")]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One page of a synthetic GPU and the real CPU, which is two machines: with one thread it has other ceilings."""
    folder = tmp_path_factory.mktemp("report")
    written = write_report([write_synthetic(folder / "records"), CPU_RECORDS], folder / "report.html", "Two machines")
    assert written["figures"] == 3 and 5e5 < written["bytes"] < 4e6
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def visit(report, chromium):
    """Opens the page with the network off; fails on a request, a console message of any kind, or an error in it."""

    def call(**options):
        page, heard = chromium.new_context(offline=True, **options).new_page(), []
        page.on("request", lambda request: heard.append(request.url))
        page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        page.goto(report)
        assert [what for what in heard if what != report and not what.startswith(("data:", "blob:"))] == []
        return page

    return call


@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_opens_what_is_asked_for_and_never_scrolls_sideways(visit, device):
    page, width = visit(**device), device["viewport"]["width"]
    assert not page.locator("#unmeasured").is_visible()
    page.locator("a[href='#unmeasured']").click()
    page.locator("summary").last.press("Enter")
    assert page.locator("#unmeasured").is_visible() and page.locator("#records").is_visible()
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.wait_for_timeout(500)
    sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert sizes[0] <= sizes[1] == width
    drawn = page.locator("figure img").evaluate_all("all => all.map(one => one.complete && one.naturalWidth > 900)")
    assert drawn == [True] * 3
    small = "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize)))"
    assert page.locator("main p, main td, main th").evaluate_all(small) >= 12

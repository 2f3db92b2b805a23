"""The report in headless Chromium: offline, on wide and narrow screens, in dark mode and on paper."""

from pathlib import Path

import pytest
from test_report_page import written

assert written  # a fixture
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}

pytestmark = [pytest.mark.more, pytest.mark.needs("browser")]


@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_opens_what_is_asked_for_and_never_scrolls_sideways(written, open_file, device):
    """One page of a synthetic GPU and the real CPU, which is two machines: with one thread it has other ceilings."""
    assert written[0]["figures"] == 3 and 5e5 < written[0]["bytes"] < 4e6
    page, width = open_file(Path(written[0]["file"]), **device), device["viewport"]["width"]
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

"""Takes screenshots of the page of `rooflab learn` on a wide and a narrow screen, and measures its first paint."""

from __future__ import annotations

import shutil
import statistics
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from rooflab.bench.learn.learn_page import write_page

SCREENS = {"wide": (1440, 900, "light"), "narrow": (360, 740, "dark")}
SLOWER = 4
"""How much slower a phone's processor is taken to be than this one, as in Lighthouse's test of phones."""


def first_paint_ms(browser: Browser, url: str) -> float:
    """Returns the median time from the start to the first content on the screen, in milliseconds, of seven loads."""
    times_ms = []
    for _ in range(7):
        page = browser.new_page(viewport={"width": 360, "height": 740})
        page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
        page.goto(url)
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        page.wait_for_function(paint)
        times_ms.append(float(page.evaluate(paint)))
        page.close()
    return statistics.median(times_ms)


def main() -> None:
    """Writes `wide.png` and `narrow.png` beside this script, and prints the first paint."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "learn.html"
        written = write_page(file)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, scheme) in SCREENS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(file.as_uri())
            page.evaluate("Promise.all([...document.querySelectorAll('[data-widget]')].map(rooflab.open))")
            page.wait_for_timeout(1500)
            taken = Image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB")
            taken.quantize(8).save(Path(__file__).with_name(f"{name}.png"), optimize=True)
        paint_ms = first_paint_ms(browser, file.as_uri())
        print(f"{written['bytes'] / 1e6:.2f} MB; first paint {paint_ms:.0f} ms on a processor {SLOWER} times slower")


if __name__ == "__main__":
    main()

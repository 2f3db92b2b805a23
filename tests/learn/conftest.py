"""The page of `rooflab learn`, written once, and a browser that opens it with the network off."""

import needs
import pytest

from rooflab.bench.learn.learn_page import render


@pytest.fixture(scope="session")
def learn_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("learn") / "learn.html"
    path.write_text(render())
    return path


@pytest.fixture(scope="session")
def open_page(learn_file):
    """Opens the page in a context of its own, with all widgets started; fails on a request or a message in it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=needs.browser(), args=["--no-sandbox"])

        def call(widgets=True, **options):
            context = started.new_context(offline=True, **options)
            page, heard = context.new_page(), []
            page.on("request", lambda request: heard.append(request.url))
            page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: heard.append(f"error: {error}"))
            page.goto(learn_file.as_uri())
            if widgets:
                page.evaluate("Promise.all([...document.querySelectorAll('[data-widget]')].map(rooflab.open))")
                page.wait_for_function("document.querySelectorAll('[data-widget]:not([data-state=open])').length === 0")
            assert [what for what in heard if what != learn_file.as_uri() and not what.startswith("data:")] == []
            return page

        yield call
        started.close()


@pytest.fixture(scope="module")
def page(open_page):
    """One open page for the tests of a file."""
    opened = open_page()
    yield opened
    opened.context.close()

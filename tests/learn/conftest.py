"""The page of `rooflab learn`, written once, and opened with the network off."""

import pytest

from rooflab.bench.learn.learn_page import render


@pytest.fixture(scope="session")
def learn_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("learn") / "learn.html"
    path.write_text(render())
    return path


@pytest.fixture(scope="module")
def open_page(learn_file, chromium):
    """Opens the page in a context of its own, with all widgets started.  No page may send a request or a message."""
    heard = []

    def call(widgets=True, **options):
        page = chromium.new_context(offline=True, **options).new_page()
        page.on("request", lambda request: heard.append(request.url))
        page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        page.goto(learn_file.as_uri())
        if widgets:
            page.evaluate("Promise.all([...document.querySelectorAll('[data-widget]')].map(rooflab.open))")
        return page

    yield call
    assert [what for what in heard if what != learn_file.as_uri() and not what.startswith("data:")] == []


@pytest.fixture(scope="module")
def page(open_page):
    """One open page for the tests of a file."""
    return open_page()

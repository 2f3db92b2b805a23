"""The page of `rooflab learn`, written once, and opened with the network off."""

import pytest

from rooflab.bench.learn.learn_page import render


@pytest.fixture(scope="session")
def learn_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("learn") / "learn.html"
    path.write_text(render())
    return path


@pytest.fixture(scope="module")
def open_page(learn_file, open_file):
    """Opens the page in a context of its own, with all widgets started."""

    def call(widgets=True, **options):
        page = open_file(learn_file, **options)
        if widgets:
            page.evaluate("Promise.all([...document.querySelectorAll('[data-widget]')].map(rooflab.open))")
        return page

    return call


@pytest.fixture(scope="module")
def page(open_page):
    """One open page for the tests of a file."""
    return open_page()

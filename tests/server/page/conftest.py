"""Fixtures of the page's tests.  The tests of a module share a browser."""

import pytest

from tests.support.server.page_kit import PageView, chromium, chromium_path


@pytest.fixture(scope="module")
def browser():
    if chromium_path() is None:
        pytest.skip("there is no Chromium or Chrome here")
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser, running):
    """Opens the page in a fresh profile; at the end, the browsers have no complaints."""
    views = []

    def open_page(*, url=running.url, opens=True, **context) -> PageView:
        context = {"reduced_motion": "reduce", **context}
        views.append(PageView(browser.new_context(**context), url, opens=opens))
        return views[-1]

    yield open_page
    complaints = [text for view in views for text in view.complaints]
    for view in views:
        view.context.close()
    assert not complaints


@pytest.fixture
def view(open_page) -> PageView:
    """The page, open on a screen of the usual size."""
    return open_page()


@pytest.fixture
def page(view):
    return view.page

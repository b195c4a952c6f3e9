"""Fixtures of the page's tests.  The tests of a module share a browser."""

import pytest

from tests.support.server.page_kit import Shown, chromium, chromium_path


@pytest.fixture(scope="module")
def browser():
    if chromium_path() is None:
        pytest.skip("there is no Chromium or Chrome here")
    with chromium() as browser:
        yield browser


@pytest.fixture
def show(browser, running):
    """Opens the page in a fresh profile; at the end, nothing may have been complained about."""
    shown = []

    def show(*, opens=True, **context) -> Shown:
        context = {"reduced_motion": "reduce", **context}
        shown.append(Shown(browser.new_context(**context), running.url, opens=opens))
        return shown[-1]

    yield show
    complaints = [text for one in shown for text in one.complaints]
    for one in shown:
        one.context.close()
    assert not complaints


@pytest.fixture
def shown(show) -> Shown:
    """The page, open on a screen of the usual size."""
    return show()


@pytest.fixture
def page(shown):
    return shown.page

"""The view of the engine in a real browser."""

import os
import re
import signal

import pytest
from playwright.sync_api import expect

from tests.support.server.kit import serving
from tests.support.server.page_kit import WIDE, Shown, until_idle

pytestmark = pytest.mark.long


@pytest.fixture
def shown(show) -> Shown:
    """The page, wide enough for the view."""
    return show(**WIDE)


def test_the_view_of_the_engine_changes_under_load(show):
    shown = show(**WIDE, reduced_motion="no-preference")
    page = shown.page
    expect(page.locator("#legend li")).to_have_count(4)
    before = page.locator("#pool").get_attribute("aria-label")
    with shown.samples():
        expect(page.locator("#samples")).to_be_in_viewport()
        expect(page.locator("#pool")).not_to_have_attribute("aria-label", before)
        expect(page.locator("#timeline")).to_have_attribute("aria-label", re.compile("decodes"))
        expect(page.locator("#requests .queued")).not_to_have_count(0)
        colours = page.locator("#pool").evaluate(
            """canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(
               0, 0, canvas.width, canvas.height).data.buffer)).size"""
        )
        assert colours > 6
        page.locator("#requests li").first.hover()
        expect(page.locator("#requests .dim")).not_to_have_count(0)
        page.click("#engine-pause")
        expect(page.locator("#engine-state")).to_have_text("Paused")
        held = page.locator("#pool").get_attribute("aria-label")
        page.wait_for_timeout(700)
        assert page.locator("#pool").get_attribute("aria-label") == held
        page.click("#engine-pause")
        expect(page.locator("#pool")).not_to_have_attribute("aria-label", held)


def test_samples_can_be_sent_and_stopped(shown, page, running):
    shown.open("/#engine")
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#timeline")).to_be_visible()
    with shown.samples():
        expect(page.locator("#samples")).to_have_text("Stop samples")
    expect(page.locator("#samples")).to_have_text("Send 18 samples")
    until_idle(running, page)


def test_why_samples_are_refused_stays_until_they_are_sent_again(shown, page):
    state, steps = page.locator("#engine-state"), page.locator("#timeline")
    shown.refuse("completions", "the server is busy")
    page.click("#samples")
    expect(state).to_have_text("the server is busy")
    before = steps.get_attribute("aria-label")
    shown.answer_to("hello")
    expect(steps).not_to_have_attribute("aria-label", before)  # an event came
    expect(page.locator("#no-requests")).to_be_visible()
    expect(state).to_have_text("the server is busy")
    page.unroute_all()
    with shown.samples():
        expect(state).to_be_hidden()
    shown.forgive("503")


def test_the_end_of_the_engine_is_said(browser):
    with serving() as running:
        shown = Shown(browser.new_context(reduced_motion="reduce", **WIDE), running.url)
        expect(shown.page.locator("#legend li")).to_have_count(4)
        (client,) = running.server.models.loaded.values()
        os.kill(client.pid, signal.SIGKILL)
        state = shown.page.locator("#engine-state")
        expect(state).to_contain_text(
            "demo is not running: the engine's process has ended by SIGKILL"
        )
        expect(shown.page.locator("#legend li")).to_have_count(0)
        shown.context.close()


def test_numbers_from_before_a_long_step_are_not_shown_as_current(shown, page, running):
    expect(page.locator("#legend li")).to_have_count(4)
    (client,) = running.server.models.loaded.values()
    os.kill(client.pid, signal.SIGSTOP)
    try:
        page.click("#samples")
        expect(page.locator("#requests-size")).to_have_text("18 unfinished")
        expect(page.locator("#engine-state")).to_contain_text("a long step is running")
        expect(page.locator("#figures dd").first).to_have_text("–")
    finally:
        os.kill(client.pid, signal.SIGCONT)
    expect(page.locator("#engine-state")).to_be_hidden()
    page.click("#samples")
    until_idle(running, page)


def test_nobody_watches_behind_a_closed_panel(shown, page):
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
        page.click("#engine-close")
    with page.expect_request("**/events"):
        page.click("#engine-toggle")

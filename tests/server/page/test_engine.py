"""The view of the engine in a real browser."""

import json
import os
import re
import signal

import pytest
from playwright.sync_api import expect

from tests.support.server.kit import serving
from tests.support.server.page_kit import WIDE, PageView, until_idle

pytestmark = pytest.mark.long


@pytest.fixture
def view(open_page) -> PageView:
    """The page, wide enough for the view, with the pool shown."""
    view = open_page(**WIDE)
    expect(view.page.locator("#legend li")).to_have_count(4)
    return view


def test_the_view_of_the_engine_changes_under_load(open_page):
    view = open_page(**WIDE, reduced_motion="no-preference")
    page = view.page
    expect(page.locator("#legend li")).to_have_count(4)
    before = page.locator("#pool").get_attribute("aria-label")
    figure = page.locator("#figures [title^='Answer tokens']").element_handle()
    with view.samples():
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
        assert figure.is_visible()  # the same element, so that its tooltip stays
        page.click("#engine-pause")
        expect(page.locator("#engine-state")).to_have_text("Paused")
        held = page.locator("#pool").get_attribute("aria-label")
        page.wait_for_timeout(700)
        assert page.locator("#pool").get_attribute("aria-label") == held
        page.click("#engine-pause")
        expect(page.locator("#pool")).not_to_have_attribute("aria-label", held)


def test_no_row_is_dim_once_the_request_under_the_pointer_has_ended(view, page):
    view.change_requests("chat/completions", ignore_eos=True)
    view.ask("tell me a story")
    with view.samples():
        page.locator("#requests li").last.hover()
        expect(page.locator("#requests .dim")).to_have_count(18)
    expect(page.locator("#requests li")).to_have_count(1)
    expect(page.locator("#requests li:not(.dim)")).to_have_count(1)


def test_why_samples_are_refused_stays_until_they_are_sent_again(view, page):
    state, steps = page.locator("#engine-state"), page.locator("#timeline")
    view.refuse("completions", "the server is busy")
    page.click("#samples")
    expect(state).to_have_text("the server is busy")
    before = steps.get_attribute("aria-label")
    view.answer_to("hello")
    expect(steps).not_to_have_attribute("aria-label", before)  # an event came
    expect(page.locator("#no-requests")).to_be_visible()
    expect(state).to_have_text("the server is busy")
    page.unroute_all()
    with view.samples():
        expect(state).to_be_hidden()


def test_the_end_of_the_engine_is_said(open_page):
    with serving() as running:
        view = open_page(url=running.url, **WIDE)
        expect(view.page.locator("#legend li")).to_have_count(4)
        (client,) = running.server.models.loaded.values()
        os.kill(client.pid, signal.SIGKILL)
        state = view.page.locator("#engine-state")
        expect(state).to_contain_text(
            "demo is not running: the engine's process has ended by SIGKILL"
        )
        expect(view.page.locator("#legend li")).to_have_count(0)
        view.context.close()


def test_numbers_from_before_a_long_step_are_not_shown_as_current(view, page, running):
    (client,) = running.server.models.loaded.values()
    os.kill(client.pid, signal.SIGSTOP)
    try:
        page.click("#samples")
        expect(page.locator("#requests-size")).to_have_text("18 unfinished")
        expect(page.locator("#engine-state")).to_contain_text("a long step is running")
        expect(page.locator("#figures dd").first).to_have_text("–")
    finally:
        os.kill(client.pid, signal.SIGCONT)
        page.click("#samples")
    expect(page.locator("#engine-state")).to_be_hidden()
    until_idle(running, page)


def test_each_model_has_a_button_and_a_preempted_request_a_mark(view, page):
    states = [{"model": name, "state": "loaded", "requests": 0} for name in ("big", "small")]
    request = {"n": 1, "id": "a", "state": "waiting", "prompt": 8, "generated": 2, "computed": 0}
    request |= {"cached": 0, "preempted": 1}
    event = {"model": "small", "time": 1, "num_steps": 0, "steps": [], "metrics": {}}
    event |= {"requests": [request], "preempted": [1]}
    body = f"event: models\ndata: {json.dumps(states)}\n\ndata: {json.dumps(event)}\n\n"
    page.route("**/events", lambda r: r.fulfill(content_type="text/event-stream", body=body))
    view.reload()
    models = page.locator("#engine-models button")
    expect(models).to_have_text(["big", "small"])
    models.last.click()
    expect(page.locator("#requests .preempted")).to_contain_text("waits, preempted 1×")


def test_nobody_watches_behind_a_closed_panel(view, page):
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
        page.click("#engine-close")
    with page.expect_request("**/events"):
        page.click("#engine-toggle")


def test_rates_are_of_the_last_seconds(page):
    found = page.evaluate(
        """async () => {
          const { History } = await import("/page/engine/history.js");
          const history = new History("demo");
          const rates = [0, 1, 2, 3, 4, 5].map((time) => {
            const steps = [{ t: time, ms: 10 * time, decodes: 1, segments: [[1, 1, 5]] }];
            const metrics = { decode_tokens: 100 * time * time, prefill_tokens: time ? 600 : 0 };
            const event = { time, num_steps: time + 1, steps, metrics, preempted: [] };
            history.addEvent({ ...event, requests: [{ n: 1 }] });
            return history.rates();
          });
          history.idle = true;
          rates.push(history.rates());
          return rates.map(({ decode, prefill, ms }) => [decode, prefill, ms]);
        }"""
    )
    assert found[3:] == [[300, 200, 20], [500, 0, 30], [700, 0, 40], [0, 0, None]]


def test_the_tip_of_a_block_names_its_numbers(page):
    found = page.evaluate(
        """async () => {
          const { PoolMap } = await import("/page/engine/pool.js");
          const map = new PoolMap(document.createElement("canvas"), () => {});
          const runs = [[7, 1], [-2, 1], [0, 1]];
          const blocks = { runs, total: 7, mapped: 7, per_cell: 3, size: 16 };
          map.draw({ blocks, known: new Map([[7, { prompt: 5, generated: 1 }]]) }, 0);
          return map.cells.map((code, i) => map.tip(i, code));
        }"""
    )
    assert found == [
        ["Blocks 0 to 2: request 7 alone", "5 tokens in, 1 out"],
        ["Blocks 3 to 5: shared", "room for 48 tokens"],
        ["Block 6: free", "room for 16 tokens"],
    ]

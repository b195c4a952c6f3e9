"""A real headless Chromium that shows the page."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.support.server.kit import Running

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAC = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)

WIDE = {"viewport": {"width": 1600, "height": 1000}}
USAGE = {
    "prompt_tokens": 1812,
    "completion_tokens": 640,
    "prompt_tokens_details": {"cached_tokens": 1600},
}
# An element that is removed gets no more events of the pointer, as the specification says.
_ARGUMENTS = ["--no-sandbox", "--enable-features=BoundaryEventDispatchTracksNodeRemoval"]
_TIMEOUT = 120_000  # ms: a busy machine shows a page late
expect.set_options(timeout=_TIMEOUT)


def chromium_path() -> str | None:
    """A Chromium or Chrome of this machine; None: there is none."""
    found = [shutil.which(name) for name in _NAMES] + [p for p in _MAC if Path(p).exists()]
    return next(filter(None, found), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that was found by `chromium_path`."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class PageView:
    """A page that is open.  complaints: errors in the console, and requests to other origins.

    text: the texts of all answers.  problem: the error below an answer.
    titles: the titles of all conversations.
    """

    def __init__(self, context: BrowserContext, url: str, *, opens: bool = True) -> None:
        """opens: open `/` at once."""
        self.context, self.url, self.complaints = context, url, []
        self.expected: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(_TIMEOUT)
        self.text = self.page.locator(".message.assistant .text")
        self.problem = self.page.locator(".message .problem")
        self.titles = self.page.locator("#conversations .title")
        context.on("console", self._read)
        context.on("weberror", lambda error: self.complaints.append(str(error.error)))
        context.on("request", lambda request: self._check(request.url))
        if opens:
            self.open()

    def open(self, path: str = "/") -> None:
        self.page.goto(self.url + path)
        self.ready()

    def ready(self) -> None:
        self.page.locator("body[data-ready]").wait_for()

    def reload(self) -> None:
        self.page.reload()
        self.ready()

    def new_tab(self) -> "PageView":
        """Another tab of the same browser, with the page open."""
        return PageView(self.context, self.url)

    def import_file(self, name: str, value: object) -> None:
        """Import a file of conversations that holds `value` as JSON."""
        buffer = json.dumps(value).encode()
        file = {"name": name, "mimeType": "application/json", "buffer": buffer}
        self.page.set_input_files("#import", file)

    def delete(self, title: str) -> None:
        """Delete a conversation in the list."""
        self.page.locator("#conversations li", has_text=title).hover()
        self.page.get_by_label(f"Delete {title}").click()
        self.page.get_by_role("button", name="Delete", exact=True).click()

    def set(self, **settings: str) -> None:
        """Change settings of the conversation, and press Save."""
        self.page.click("#settings-open")
        for name, value in settings.items():
            field = self.page.locator(f"#set-{name}")
            (field.select_option if name == "thinking" else field.fill)(value)
        self.page.get_by_role("button", name="Save").click()

    @contextmanager
    def samples(self) -> Iterator[None]:
        """While the page's 18 sample requests run; they are long enough for a slow browser."""
        self.change_requests("completions", max_tokens=3000)
        self.page.press("#samples", "Enter")  # the button may move until the first steps are shown
        expect(self.page.locator("#requests li").nth(17)).to_be_visible()
        try:
            yield
        finally:
            self.page.press("#samples", "Enter")  # the pointer stays where it is
            expect(self.page.locator("#samples")).to_have_text("Send 18 samples")

    def seat(self, *, running: int, waiting: int = 0, models: int = 1) -> None:
        """Let the view of the engine show these requests, in a stream of events that stays open."""
        names = [f"model-{i}" for i in range(models)]
        states = [{"model": n, "state": "loaded", "error": None, "requests": 0} for n in names]
        requests = [
            {"n": n, "id": f"r{n}", "state": "running" if n <= running else "waiting"}
            | {"prompt": 1000 + n, "generated": 12_000 + n, "computed": 900, "cached": 500}
            | {"preempted": n % 2}
            for n in range(1, running + waiting + 1)
        ]
        segments = [[n, 1 + 40 * (n == running), 900] for n in range(1, running + 1)]
        step = {"t": 1.0, "ms": 312.5, "decodes": running - 1, "segments": segments}
        counts = {"owned": 30_000, "shared": 20, "cached": 9_000, "free": 26_980}
        blocks = {"total": 66_000, "mapped": 12_800, "per_cell": 40, "size": 16, "counts": counts}
        blocks["runs"] = [*([n, 5] for n in range(1, running + 1)), [-2, 5], [-1, 60], [0, 105]]
        metrics = {"decode_tokens": 0, "prefill_tokens": 0, "preemptions": 12, "draft_tokens": 90}
        metrics |= {"accepted_tokens": 83, "blocks_owned": 39_000, "blocks_total": 66_000}
        metrics |= {"prefix_cache_queried_tokens": 90, "prefix_cache_hit_tokens": 20}
        metrics |= {"requests_running": running, "requests_waiting": waiting}
        events = [
            {"model": name, "time": float(time), "num_steps": time, "steps": [step | {"t": time}]}
            | {
                "metrics": metrics
                | {"decode_tokens": 12_345 * time, "prefill_tokens": 9_999 * time}
            }
            | {"requests": requests, "preempted": [2], "blocks": blocks}
            for name in reversed(names)
            for time in (1, 2)
        ]
        body = f"event: models\ndata: {json.dumps(states)}\n\n"
        body += "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.page.add_init_script(
            """{ const real = window.fetch;
            const open = () => new ReadableStream({start: (stream) => stream.enqueue(
              new TextEncoder().encode(BODY))});
            window.fetch = async (path, options) =>
              path === "/events" ? new Response(open()) : real(path, options); }""".replace(
                "BODY", json.dumps(body)
            )
        )

    def answer_with(self, *deltas: dict, usage: dict | None = None, finish: str = "stop") -> None:
        """Let the page get these deltas as the answer to all its questions."""
        chunks = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if usage:
            chunks.append({"choices": [], "usage": usage})
        self.answer_with_events(*map(json.dumps, chunks), "[DONE]")

    def answer_with_events(self, *events: str) -> None:
        """As `answer_with`, with the data of each event."""
        body = "".join(f"data: {event}\n\n" for event in events)
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )

    def body_of(self, text: str) -> Any:
        """Ask; returns the body of the request."""
        with self.page.expect_request("**/v1/chat/completions") as asked:
            self.ask(text)
        return asked.value.post_data_json

    def change_requests(self, path: str, **fields: object) -> None:
        """Let the server get these fields in the page's requests."""

        def change(route: Route) -> None:
            body = {**(route.request.post_data_json or {}), **fields}
            route.continue_(post_data=json.dumps(body))

        self.page.route(f"**/v1/{path}", change)

    def name_model(self, **fields: object) -> None:
        """Let the page get these fields of its model."""

        def models(route: Route) -> None:
            listed = route.fetch().json()
            listed["data"][0] |= fields
            route.fulfill(json=listed)

        self.page.route("**/v1/models", models)

    def refuse(self, path: str, message: str, status: int = 503) -> None:
        """Let the page get an error for all its requests to this path."""
        self.expect_complaints(f"status of {status}")
        error = {"error": {"message": message}}
        self.page.route(f"**/v1/{path}", lambda route: route.fulfill(status=status, json=error))

    def expect_complaints(self, words: str) -> None:
        """From now on, let the page complain with these words, such as Chromium's on a 503."""
        self.expected.append(words)

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answered(self, n: int) -> str:
        """Wait until n answers are complete; returns the text of the last."""
        answer = self.page.locator(".message.assistant[aria-busy=false]").nth(n - 1)
        answer.wait_for()
        return answer.locator(".text").inner_text()

    def answer_to(self, text: str) -> str:
        """Ask, and wait for the answer; returns its text."""
        number = self.page.locator(".message.assistant").count() + 1
        self.ask(text)
        return self.answered(number)

    def _read(self, message: object) -> None:
        expected = any(words in message.text for words in self.expected)
        if message.type in ("error", "warning") and not expected:
            self.complaints.append(message.text)

    def _check(self, url: str) -> None:
        scheme, host = urlsplit(url)[:2]
        if scheme not in ("blob", "data") and host != urlsplit(self.url)[1]:
            self.complaints.append(f"a request to {url}")


def until_idle(running: Running, page: Page) -> None:
    """Wait until the server has no requests."""
    for _ in range(_TIMEOUT // 50):
        if not running.server.requests:
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"requests that nobody reads still run: {list(running.server.requests)}")

"""A crowd of clients: all APIs, streamed and not; some hang up, some send nonsense."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

_FACTS = ("The key is under the red mat.", "Anna walks to the old mill.", "It rained on Monday.")


@dataclass(frozen=True)
class Question:
    """A question.  max_tokens: the exact length of its answer, because end tokens are ignored."""

    text: str
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": self.text},
        ]


def questions(count: int) -> list[Question]:
    """Prompts of 30 to about 200 tokens; every third shares its first half with others."""
    rng = random.Random(7)
    return [
        Question(
            " ".join([f"Note {i % 3 and i}.", *rng.choices(_FACTS, k=rng.randint(1, 18))])
            + " What is under the mat?",
            rng.randint(4, 48),
        )
        for i in range(count)
    ]


@dataclass(frozen=True)
class Visit:
    """One request.

    question: the number of its question; None for nonsense.
    leaves_after: the seconds after which its client leaves; None if the client stays.
    """

    path: str
    body: bytes
    question: int | None = None
    leaves_after: float | None = None


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes


@dataclass
class Crowd:
    """Draws visits and judges the replies.

    asked: the questions.  answers: the right greedy answer of each.  token_ids: the prompt of each.
    faults: a line for each wrong reply.
    """

    url: str
    asked: list[Question]
    answers: list[str]
    token_ids: list[list[int]]
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def draw(self, rng: random.Random, patience: float) -> Visit:
        """patience: longest time until a client that leaves does so."""
        if rng.random() < 0.15:
            return Visit(rng.choice(PATHS), rng.choice(NONSENSE))
        visit = self.asking(rng, rng.randrange(len(self.asked)))
        leaves_after = rng.uniform(0, patience) if rng.random() < 0.4 else None
        return replace(visit, leaves_after=leaves_after)

    def asking(self, rng: random.Random, number: int) -> Visit:
        """A visit with this question, until the answer's end."""
        path = rng.choice(PATHS)
        body = _body(path, self.asked[number], self.token_ids[number])
        body |= {"temperature": 0, "ignore_eos": True, "stream": rng.random() < 0.5}
        return Visit(path, json.dumps(body).encode(), number)

    async def go(self, visit: Visit, seconds: float) -> None:
        """Make a visit, and note what came of it.  seconds: longest time."""
        try:
            async with asyncio.timeout(seconds):
                reply = await send(self.url, "POST", visit.path, visit.body, visit.leaves_after)
        except Exception as e:
            self._fault(visit, repr(e))
            return
        if reply is None:
            self.counts["left"] += 1
        elif visit.question is None:
            self.counts["refused"] += 1
            if not 400 <= reply.status < 500:
                self._fault(visit, f"{reply.status} {reply.body[:200]!r}")
        else:
            self.counts["answered"] += 1
            self._judge(visit, visit.question, reply)

    def _judge(self, visit: Visit, number: int, reply: Reply) -> None:
        if reply.status != 200:
            self._fault(visit, f"{reply.status} {reply.body[:200]!r}")
            return
        try:
            text = text_of(visit.path, reply.body)
        except Exception as e:
            self._fault(visit, f"{e!r} in {reply.body[-300:]!r}")
            return
        if text != self.answers[number]:
            self._fault(visit, f"{text!r} instead of {self.answers[number]!r}")

    def _fault(self, visit: Visit, what: str) -> None:
        self.faults.append(f"{visit.path} {visit.body[:100]!r}: {what}")


async def send(
    url: str, method: str, path: str, body: bytes = b"", leaves_after: float | None = None
) -> Reply | None:
    """The reply to a request; None if the client has left before its end."""
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=None, verify=False) as client:
        try:
            async with asyncio.timeout(leaves_after):
                reply = await client.request(method, path, content=body, headers=headers)
        except TimeoutError:
            return None
    return Reply(reply.status_code, reply.content)


async def get(url: str, path: str) -> Any:
    """The JSON of a GET."""
    reply = await send(url, "GET", path)
    assert reply is not None
    return json.loads(reply.body)


def text_of(path: str, reply: bytes) -> str:
    """The text of a whole reply; of a stream, its end is checked too."""
    if not reply.startswith((b"data:", b"event:", b":")):
        return _whole(path, json.loads(reply))
    data = [line[6:] for line in reply.decode().splitlines() if line.startswith("data: ")]
    done = data[-1] == "[DONE]"
    events = [json.loads(one) for one in (data[:-1] if done else data)]
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert done
        assert events[-1]["choices"][0]["finish_reason"]
    else:
        assert events[-1]["type"] in ("message_stop", "response.completed", "response.incomplete")
    return "".join(_news(event) for event in events)


def _whole(path: str, reply: dict[str, Any]) -> str:
    if path == "/v1/responses":
        return reply["output"][0]["content"][0]["text"]
    if path == "/v1/messages":
        return reply["content"][0]["text"]
    choice = reply["choices"][0]
    return choice["text"] if path == "/v1/completions" else choice["message"]["content"]


def _news(event: dict[str, Any]) -> str:
    kind = event.get("type")
    if kind == "response.output_text.delta":
        return event["delta"]
    if kind == "content_block_delta":
        return event["delta"]["text"]
    if kind is not None:
        return ""
    (choice,) = event["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def _body(path: str, question: Question, token_ids: list[int]) -> dict[str, Any]:
    """A question as a request of the path's API.  token_ids: its prompt."""
    (system, user), limit = question.messages, {"max_tokens": question.max_tokens}
    return {
        "/v1/chat/completions": {"messages": [system, user], **limit},
        "/v1/completions": {"prompt": token_ids, **limit},
        "/v1/responses": {"input": [system, user], "max_output_tokens": question.max_tokens},
        "/v1/messages": {"system": system["content"], "messages": [user], **limit},
    }[path]


_HI = '"messages":[{"role":"user","content":"hi"}],"prompt":"hi","input":"hi","max_tokens":2'

NONSENSE = [
    b"",
    b"{",
    b"[1]",
    b"\xff\xfe",
    b"[" * 10_000,
    f"{{{_HI},".encode(),
    f'{{{_HI},"model":"nobody"}}'.encode(),
    f'{{{_HI},"temperature":"warm"}}'.encode(),
    f'{{{_HI},"seed":1.5}}'.encode(),
    f'{{{_HI},"stream":"yes"}}'.encode(),
    b'{"messages":[{"role":"user","content":[{"type":"image"}]}],"max_tokens":2,"input":{}}',
    f'{{"messages":[{{"role":"user","content":"{"a b " * 3000}"}}],"max_tokens":2,'
    f'"input":"{"a b " * 3000}","prompt":"{"a b " * 3000}"}}'.encode(),
]


async def until(check: Callable[[], Awaitable[str]], seconds: float) -> str:
    """Ask until nothing is wrong; returns what still is at the end."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (wrong := await check()) and loop.time() < end:
        await asyncio.sleep(0.2)
    return wrong


async def unclean(url: str) -> str:
    """What /status still shows of requests; "" if nothing."""
    status = await get(url, "/status")
    metrics = [model.get("metrics", {}) for model in status["models"]]
    left = {
        name: [one.get(name) for one in metrics]
        for name in ("requests_running", "requests_waiting", "blocks_owned")
        if any(one.get(name) for one in metrics)
    }
    if status["server"]["running"] or status["server"]["waiting"]:
        left["server"] = status["server"]
    return str(left) if left else ""

#!/usr/bin/env python3
"""The sessions of `tools.bench.agents`, in a process of their own.

    python -m tools.bench.lib.agent_client http://127.0.0.1:8000 < job.json

job.json: {"model", "system", "sessions": [[[question, answer], ...], ...], "max_tokens",
"seconds"}.  All sessions run at once; each asks its questions one behind the other, over streamed
chat completions.  The recorded answer goes into the next prompt, not the generated one: all servers
see the same prompts.  Prints one JSON object: the turns that ended within `seconds`, and how many
seconds all took.
"""

import asyncio
import json
import sys
import time
from typing import Any

from tools.bench.lib.server_client import stream


async def session(url: str, job: dict[str, Any], turns: Any, started: float, done: Any) -> None:
    messages = [{"role": "system", "content": job["system"]}]
    for number, (question, answer) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        body = {
            "model": job["model"], "messages": messages, "max_tokens": job["max_tokens"],
            "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        done.append({"turn": number, **await stream(url, "/v1/chat/completions", body, started)})
        messages.append({"role": "assistant", "content": answer})


async def main(url: str, job: dict[str, Any]) -> dict[str, Any]:
    done: list[dict[str, Any]] = []
    started = time.perf_counter()
    running = [
        asyncio.ensure_future(session(url, job, turns, started, done)) for turns in job["sessions"]
    ]
    await asyncio.wait(running, timeout=job["seconds"])
    seconds = time.perf_counter() - started
    failed = [t.exception() for t in running if t.done() and not t.cancelled() and t.exception()]
    if failed:
        raise failed[0]
    return {"turns": list(done), "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], json.load(sys.stdin)))), flush=True)

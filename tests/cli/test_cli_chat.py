"""`vllm-metal-lite chat`: as a person at a terminal meets it, and in a pipe."""

import ctypes
import logging
import os
import re
import readline
import shutil
import signal
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.models import tiny_models
from tests.support.server.cli_kit import CONTEXT, CONTROL_C, ENDLESS, Typist, model_folder, pipe
from vllm_metal_lite.cli.conversation import Conversation
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.engine.interrupt import DeferredInterrupt
from vllm_metal_lite.engine.llm import LLM
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.sampling_params import SamplingParams

PROMPT = r">>> "
ANSI = "\x1b"


@pytest.fixture
def typist():
    """Starts the chat at a terminal; greedy, and without colours."""
    people = []

    def start(*flags: str, colour: bool = False, model: Path | None = None) -> Typist:
        env, model = {"NO_COLOR": "" if colour else "1"}, model or model_folder()
        people.append(Typist("chat", model, "--temperature", "0", *flags, env=env))
        return people[-1]

    yield start
    for person in people:
        person.close()


def _status(text: str) -> dict[str, int]:
    match = re.search(r"\[(\d+) prompt tokens, (\d+) of them cached, (\d+) new", text)
    assert match, text
    return dict(zip(("prompt", "cached", "new"), map(int, match.groups()), strict=True))


def test_a_conversation(typist):
    me = typist("--max-tokens", "20")
    start = me.wait(PROMPT)
    for word in ("qwen3", "CPU cores", f"{CONTEXT:,} tokens", "blocks of 16", "reference"):
        assert word in start

    me.type("hello 🎉 " + "x" * 60)
    first = me.wait(PROMPT)
    status = _status(first)
    assert status == {"prompt": 74, "cached": 0, "new": 20}
    assert "cut: max_tokens" in first
    assert "tokens/s" in first

    me.type("and\\")
    me.wait(r"\.\.\. ")
    me.type("more")
    second = _status(me.wait(PROMPT))
    assert second["cached"] >= 64
    assert second["prompt"] >= status["prompt"] + len("and\nmore")

    me.type("/nonsense")
    assert "no command /nonsense" in me.wait(PROMPT)
    me.type("/help")
    assert "/system TEXT" in me.wait(PROMPT)
    for nothing in ("", "   "):
        me.type(nothing)
        assert "prompt tokens" not in me.wait(PROMPT)

    me.type("/reset")
    me.wait(PROMPT)
    me.type("hello 🎉 " + "x" * 60)
    again = me.wait(PROMPT)
    assert _status(again) == {"prompt": 74, "cached": 64, "new": 20}  # the same blocks, found again

    me.type("/system be kind")
    me.wait(PROMPT)
    me.type("/system")
    assert "be kind" in me.wait(PROMPT)
    me.type("x")
    assert _status(me.wait(PROMPT))["prompt"] == 1 + 7 + 1 + 4

    me.type("y" * CONTEXT)
    refused = me.wait(PROMPT)
    assert f"the context holds {CONTEXT}" in refused
    assert "taken back" in refused
    me.type("x")  # the conversation is unharmed
    assert _status(me.wait(PROMPT))["prompt"] < 80

    me.press("\x04")
    assert me.leave() == 0
    assert ANSI + "[2m" not in me.seen
    assert "Traceback" not in me.seen


def test_control_c(typist):
    me = typist(colour=True, model=model_folder(context=ENDLESS))
    me.wait(PROMPT)
    me.type("speak")
    me.wait(r"speak\r\n.{10}")
    me.press(CONTROL_C)
    stopped = me.wait(PROMPT)
    assert "] stopped" in stopped
    said = _status(stopped)
    assert 0 < said["new"] < ENDLESS - said["prompt"]
    assert ANSI + "[2m[" in stopped

    me.type("go on")  # with what was said so far
    me.wait(r"go on\r\n.{10}")
    me.press(CONTROL_C)
    after = _status(me.wait(PROMPT))
    assert after["prompt"] > said["prompt"] + len("go on")
    assert after["cached"] >= 16 * (said["prompt"] // 16)

    me.press("half a line")
    me.wait("half a line")
    me.interrupt()
    assert "again leaves" not in me.wait(PROMPT)
    me.interrupt()
    assert "again leaves" in me.wait(PROMPT)
    me.type("/help")  # anything in between, and it takes two again
    me.wait(PROMPT)
    me.interrupt()
    me.wait(PROMPT)
    me.interrupt()
    assert me.leave() == 130
    assert "Traceback" not in me.seen


def test_the_context_runs_full_in_an_answer(typist):
    me = typist("--max-model-len", "64")
    me.wait(PROMPT)
    me.type("x")
    assert "cut: the context of 64 tokens is full" in me.wait(PROMPT)
    me.type("x")
    assert "/reset" in me.wait(PROMPT)
    me.type("/reset")
    me.wait(PROMPT)
    me.type("/quit")
    assert me.leave() == 0


def test_control_c_while_the_model_loads(typist, tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")  # which nobody writes: loading does not end
    me = typist(model=folder)
    me.wait("Loading")
    me.press(CONTROL_C)
    assert me.leave() == 130
    assert "Traceback" not in me.seen


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no pastes")
def test_a_pasted_text_is_one_message(typist):
    me = typist("--max-tokens", "8")
    me.wait(PROMPT)
    assert "\x1b[?2004h" in me.seen  # asks the terminal to put brackets around what is pasted
    me.press("\x1b[200~one\rtwo\rthree\x1b[201~")
    me.wait("three")
    me.press("\r")
    seen = me.wait(PROMPT)
    assert f"[{1 + len('one two three') + 2} prompt tokens" in seen
    assert seen.count("prompt tokens") == 1


def test_a_command_with_text_after_it(typist):
    me = typist("--max-tokens", "8")
    me.wait(PROMPT)
    me.type("/quit now")
    assert "/quit takes no text after it" in me.wait(PROMPT)
    me.type("  /quit ")  # after a space it is a message
    assert "prompt tokens" in me.wait(PROMPT)
    me.type("/quit ")
    assert me.leave() == 0


def test_control_c_in_a_step_is_answered_at_once():
    """The main thread is in C, as in a step, and returns only when Ctrl-C is answered."""
    reader, writer = os.pipe()
    late = threading.Timer(20, os.write, [writer, b"late"])
    byte = ctypes.create_string_buffer(1)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    with DeferredInterrupt(lambda: os.write(writer, b"!")) as interrupt:
        signal.siginterrupt(signal.SIGINT, False)
        main_thread = threading.main_thread().ident
        press = threading.Timer(0.1, signal.pthread_kill, [main_thread, signal.SIGINT])
        press.start()
        late.start()
        ctypes.CDLL(None).read(reader, byte, 1)
        late.cancel()
        assert byte.raw == b"!"
        press.join()
        assert interrupt.pressed
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL
    for fd in (reader, writer):
        os.close(fd)


def test_the_first_output_is_timed_if_it_holds_several_tokens():
    llm = LLM(str(model_folder()), max_num_seqs=1)
    form = {"regex": "The answer: (yes|no)"}
    conversation = Conversation(llm.engine, SamplingParams(temperature=0, structured_outputs=form))
    turn = conversation.ask("hello", lambda text: None, lambda: None)
    assert 0 < turn.seconds_to_first < turn.seconds


def test_no_thinking_turns_the_switch_of_the_template_whatever_its_name_is():
    llm = LLM(str(model_folder()), max_num_seqs=1)
    source = (
        "{% if thinking is defined and not thinking %}quick {% endif %}{{ messages[0].content }}"
    )
    llm.get_tokenizer()._tokenizer.chat_template = source
    for thinking, expected in (True, "hello"), (False, "quick hello"):
        params = SamplingParams(temperature=0, max_tokens=1)
        conversation = Conversation(llm.engine, params, thinking=thinking)
        turn = conversation.ask("hello", lambda text: None)
        assert llm.get_tokenizer().decode(turn.output.prompt_token_ids) == expected


def test_control_c_in_a_long_prompt_stops_at_the_next_chunk(monkeypatch):
    llm = LLM(str(model_folder()), max_num_seqs=1, max_num_batched_tokens=32)
    conversation = Conversation(llm.engine, SamplingParams(temperature=0, max_tokens=4))
    step, said = llm.engine.step, threading.Event()

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    written = []
    turn = conversation.ask("x" * (CONTEXT // 2), written.append, said.set)
    assert not "".join(written)
    assert said.is_set()
    assert turn.end == "dropped"
    assert conversation.messages == []
    assert llm.metrics()["prefill_tokens"] <= 64  # one step, and one that was submitted ahead
    monkeypatch.undo()
    assert conversation.ask("go on", written.append, pytest.fail).end == "max_tokens"
    assert "".join(written)


def test_a_failed_step_takes_the_message_back(monkeypatch):
    llm = LLM(str(model_folder()), max_num_seqs=1)
    conversation = Conversation(llm.engine, SamplingParams(temperature=0, max_tokens=4))
    lost = Mock(side_effect=RuntimeError("[METAL] out of memory"))
    monkeypatch.setattr(llm.engine.runner, "execute", lost)
    with pytest.raises(RequestError, match=r"a step of the engine failed: \[METAL\] out of memory"):
        conversation.ask("hello", pytest.fail)
    assert conversation.messages == []
    monkeypatch.undo()
    assert conversation.ask("hello", lambda text: None).end == "max_tokens"


@pytest.fixture
def piped(monkeypatch, capsys):
    """Runs the command with this text on stdin; returns (exit code, stdout, stderr)."""

    def run(text: str | bytes, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", pipe(text))
        return main(
            ["chat", str(model_folder()), "--temperature", "0", *flags]
        ), *capsys.readouterr()

    return run


def test_a_pipe_gets_only_the_answer(piped):
    message = "hello\nwörld 🎉"
    flags = "--max-tokens", "30", "--system", "be brief"
    code, out, err = piped(f"\n{message}\n\n", *flags)
    assert (code, err) == (0, "The answer was cut off at 30 tokens (--max-tokens).\n")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": message}]
    llm = LLM(str(model_folder()), max_num_seqs=1)
    answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=30))[0].outputs[0].text
    assert out == answer + "\n"
    code, _, err = piped(b"\xff\xfe no UTF-8", *flags)
    assert (code, err) == (0, "The answer was cut off at 30 tokens (--max-tokens).\n")
    code, out, err = piped("x" * CONTEXT, *flags)
    assert (code, out) == (1, "")
    assert f"the context holds {CONTEXT}" in err


def test_a_piped_answer_says_that_it_is_cut(piped):
    code, out, err = piped("hello", "--max-model-len", "64")
    assert (code, bool(out)) == (1, True)
    assert err == "error: the answer was cut off: the context of 64 tokens is full\n"


@pytest.mark.long
def test_a_recurrent_model_keeps_its_system_prompt_when_the_conversation_starts_over(tmp_path):
    folder = tiny_models.write_folder(tmp_path / "hybrid", "qwen3_next")
    engine = LLM(str(folder), num_blocks=64, block_size=8, max_num_batched_tokens=64).engine
    params = SamplingParams(temperature=0, max_tokens=4)
    conversation = Conversation(engine, params, system="one two three " * 4)
    conversation.ask("Who are you?", lambda text: None)
    conversation.reset()
    turn = conversation.ask("And then?", lambda text: None)
    assert turn.output.num_cached_tokens >= 48


def test_transformers_does_not_warn_of_a_limit_that_is_ours(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    llm = LLM("demo", num_blocks=8)
    with (
        caplog.at_level(logging.WARNING, "transformers"),
        pytest.raises(ValueError, match="room for"),
    ):
        llm.generate("a b " * 3000, SamplingParams(max_tokens=1))
    assert not [record for record in caplog.records if record.name.startswith("transformers")]

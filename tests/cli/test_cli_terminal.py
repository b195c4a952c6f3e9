"""What a person at a terminal meets: widths, pastes, Ctrl-C in a long prompt, cut answers."""

import ctypes
import logging
import os
import readline
import signal
import sys
import threading

import pytest

from tests.support.cli_kit import CONTEXT, Typist, model_folder, pipe
from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.cli.conversation import Conversation
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.engine.interrupt import DeferredInterrupt

PROMPT = r">>> "
GREEDY = ["--temperature", "0", "--max-tokens", "8"]


@pytest.fixture
def typist():
    person = Typist("chat", model_folder(), *GREEDY, env={"NO_COLOR": "1"})
    person.wait(PROMPT)
    yield person
    person.close()


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no pastes")
def test_a_pasted_text_is_one_message(typist):
    assert "\x1b[?2004h" in typist.seen  # asks the terminal to put brackets around what is pasted
    typist.press("\x1b[200~one\rtwo\rthree\x1b[201~")
    typist.wait("three")
    typist.press("\r")
    seen = typist.wait(PROMPT)
    assert f"[{1 + len('one two three') + 2} prompt tokens" in seen
    assert seen.count("prompt tokens") == 1


def test_a_command_with_text_after_it(typist):
    typist.type("/quit now")
    assert "/quit takes no text after it" in typist.wait(PROMPT)
    typist.type("/resett")
    assert "There is no command /resett" in typist.wait(PROMPT)
    typist.type("  /quit ")  # after a space it is a message
    assert "prompt tokens" in typist.wait(PROMPT)
    typist.type("/quit ")
    assert typist.leave() == 0


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
    assert not turn.kept
    assert conversation.messages == []
    assert llm.metrics()["prefill_tokens"] <= 64  # one step, and one that was submitted ahead
    monkeypatch.undo()
    assert conversation.ask("go on", written.append, pytest.fail).kept
    assert "".join(written)


def test_a_piped_answer_says_that_it_is_cut(capsys, monkeypatch):
    """For a cut that was requested: test_a_pipe_gets_only_the_answer."""
    monkeypatch.setattr(sys, "stdin", pipe("hello"))
    assert main(["chat", str(model_folder()), "--temperature", "0", "--max-model-len", "64"]) == 1
    out, err = capsys.readouterr()
    assert out
    assert err == "error: the answer is cut: the context of 64 tokens is full\n"


def test_a_line_of_messages_needs_a_chat_template(capsys, tmp_path):
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    assert main(["generate", str(lines), "--model", str(model_folder(template=False))]) == 1
    out, _ = capsys.readouterr()
    assert "has no chat template, so it takes no messages: give it a prompt" in out
    assert "generate" not in out


def test_transformers_does_not_warn_of_a_limit_that_is_ours():
    warned = []
    logger = logging.getLogger("transformers")
    handler, level = logging.Handler(), logger.level
    handler.emit = warned.append
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        llm = LLM("demo", num_blocks=8)
        with pytest.raises(ValueError, match="room for"):
            llm.generate("a b " * 3000, SamplingParams(max_tokens=1))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert not warned

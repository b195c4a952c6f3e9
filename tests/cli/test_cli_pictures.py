"""Pictures on the command line, with a tiny model that reads digits."""

import base64
import json
from pathlib import Path

import pytest

from tests.support.images.drawn import DIGIT, READER, png
from tests.support.server.cli_kit import Typist, model_folder
from vllm_metal_lite.cli.files import first_word, is_dropped
from vllm_metal_lite.cli.main import main


@pytest.fixture
def typist(tmp_path):
    """Starts the chat at a terminal, in a folder with pictures; greedy, and without colours."""
    (tmp_path / "My 7.png").write_bytes(png(7))
    (tmp_path / "three.png").write_bytes(png(3, "red"))
    (tmp_path / "damaged.png").write_bytes(png(3)[:100])
    people = []

    def start(model: Path) -> Typist:
        flags = ("--temperature", "0", "--max-tokens", "20")
        people.append(
            Typist("chat", str(model), *flags, env={"NO_COLOR": "1", "HOME": str(tmp_path)})
        )
        people[-1].wait(">>> ")
        return people[-1]

    yield start
    for person in people:
        person.close()


def test_a_conversation_about_pictures(typist, tmp_path):
    me = typist(READER)

    def said(line: str) -> str:
        me.type(line)
        return me.wait(">>> ")

    assert "It is a 7." in said(f"/image '{tmp_path}/My 7.png' {DIGIT}")
    later = said("Which colour is it?")
    assert "It is blue." in later  # the turn still has the picture
    assert " 0 of them cached" not in later

    for line, why in (
        ("/image", "error: /image needs the path of a picture"),
        (f"/image ~/none.png {DIGIT}", "error: there is no file '~/none.png'"),
        (f"/image {tmp_path} {DIGIT}", "error: there is no file"),
        (f"/image ~/damaged.png {DIGIT}", "error: the picture of 100 bytes cannot be decoded"),
    ):
        refused = said(line)
        assert why in refused
        assert "prompt tokens" not in refused
    assert "It is blue." in said("Which colour is it?")  # nothing was lost

    said("/reset")
    assert "The picture goes with your next message" in said("/image ~/three.png")
    assert "The pictures go with your next message" in said("/image ~/three.png")
    assert "No picture waits" in said("/image -")
    assert "see no picture" in said(DIGIT)
    said("/reset")
    said(f"{tmp_path}/My\\ 7.png ".replace("My\\ 7", "three"))  # dropped on the terminal
    assert "It is a 3." in said(DIGIT)
    said("/image ~/three.png")
    refused = said("x" * 1100)
    assert "Your message and its pictures were taken back" in refused
    assert "/image PATH [QUESTION]" in said("/help")
    me.type("/quit")
    assert me.leave() == 0
    assert "Traceback" not in me.seen


def test_a_model_of_text_refuses_a_picture(typist):
    me = typist(model_folder())
    me.type(f"/image ~/three.png {DIGIT}")
    refused = me.wait(">>> ")
    assert "takes text only" in refused
    assert "prompt tokens" not in refused


@pytest.mark.parametrize(
    ("line", "word", "rest"),
    [
        ("", "", ""),
        ("a.png", "a.png", ""),
        ("a.png what is\nthis? ", "a.png", "what is\nthis?"),
        (r"/my\ pictures/a\'b.png  what's this?", "/my pictures/a'b.png", "what's this?"),
        ("'/my pictures/a.png' don't", "/my pictures/a.png", "don't"),
        (r'"/my \"pictures\"/a.png"', '/my "pictures"/a.png', ""),
        ("don't.png", "don", "'t.png"),  # a quote without its end
        ("a\\", "a", "\\"),
    ],
)
def test_the_first_word_of_a_line(line, word, rest):
    assert first_word(line) == (word, rest)


def test_a_line_that_begins_with_a_picture_is_a_dropped_file(tmp_path):
    (tmp_path / "a b.PNG").touch()
    (tmp_path / "notes.txt").touch()
    quoted = f"'{tmp_path}/a b.PNG'"
    assert is_dropped(quoted)
    assert is_dropped(f"{tmp_path}/a\\ b.PNG what is this?")
    for line in (
        f"What is {quoted}?",
        f" {quoted}",
        f"{tmp_path}/notes.txt",
        "/none.png",
        "/\0.png",
    ):
        assert not is_dropped(line)


@pytest.mark.parametrize("sees", [True, False])
def test_lines_of_generate_with_pictures(sees, tmp_path):
    def line(url: str) -> str:
        picture = {"type": "image_url", "image_url": {"url": url}}
        content = [picture, {"type": "text", "text": DIGIT}]
        return json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n"

    urls = [f"data:image/png;base64,{base64.b64encode(png(digit)).decode()}" for digit in (7, 3)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(map(line, [*urls, "https://example.com/a.png"])))
    model = READER if sees else model_folder()
    flags = ("--model", str(model), "--temperature", "0", "--max-tokens", "20")
    assert main(["generate", str(source), "-o", str(target), *flags]) == 1
    results = [json.loads(x) for x in target.read_text().splitlines()]
    if sees:
        assert [r["text"] for r in results[:2]] == ["It is a 7.", "It is a 3."]
        assert "must be data:image/" in results[2]["error"]
    else:
        for number, result in enumerate(results, 1):
            assert result["error"].startswith(f"line {number}: ")
            assert "takes text only" in result["error"]

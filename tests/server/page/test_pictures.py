"""Pictures in the chat, in a real browser, for a model that sees."""

import base64
import io

import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.support.images.drawn import READER, file_of, png
from tests.support.server.kit import serving
from vllm_metal_lite.server.served_model import ModelSpec

pytestmark = pytest.mark.long


def upload(name: str, data: bytes) -> dict:
    """A file that an <input> takes."""
    return {"name": name, "mimeType": "image/png", "buffer": data}


DIGIT = upload("seven.png", png(7))
WIDE = upload("wide.png", file_of(Image.new("RGB", (4096, 100), "red")))
NOTES = {"name": "notes.md", "mimeType": "", "buffer": b"level 3"}


def picture_of(part: dict) -> Image.Image:
    """The picture of a part of a request."""
    assert part["type"] == "image_url"
    head, data = part["image_url"]["url"].split(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.fixture(scope="module")
def reading():
    """A server whose tiny model reads a digit and its colour."""
    with serving([ModelSpec("reader", str(READER))]) as running:
        yield running


def test_a_model_reads_a_picture_that_is_attached(reading, open_page):
    """All parts are real: the browser, the server, the tower and the model."""
    view = open_page(url=reading.url)
    view.page.set_input_files("#attach", [DIGIT])
    assert view.answer_to("Which digit is this?") == "It is a 7."
    assert view.answer_to("Which colour is it?") == "It is blue."
    other = upload("three.png", png(3, "red"))
    view.page.set_input_files("#attach", [other])
    assert view.answer_to("Which digit is this?") == "It is a 3."


@pytest.fixture
def view(open_page):
    view = open_page(opens=False)
    view.name_model(input_modalities=["text", "image"])
    view.open()
    view.answer_with({"content": "It is a 7."})
    return view


def test_pictures_go_with_a_message(view, page):
    damaged = {**DIGIT, "name": "damaged.png", "buffer": DIGIT["buffer"][:40]}
    field = page.get_by_label("Attach pictures or text files")
    field.set_input_files([DIGIT, WIDE, damaged, NOTES])
    expect(page.locator("#problem-text")).to_have_text(
        "damaged.png cannot be shown by this browser."
    )
    attached = page.locator("#attached li")
    expect(attached).to_have_text(["seven.png", "wide.png", "notes.md"])
    expect(attached.locator("img")).to_have_count(2)
    assert (
        attached.locator("img").first.evaluate("e => e.decode().then(() => e.naturalWidth)") == 64
    )
    page.get_by_role("button", name="Remove wide.png").press("Enter")
    expect(attached).to_have_text(["seven.png", "notes.md"])
    expect(page.locator("#prompt")).to_be_focused()

    (message,) = view.body_of("Which digit is this?")["messages"]
    first, second = message["content"]
    assert first["image_url"]["url"].split(",")[1] == base64.b64encode(DIGIT["buffer"]).decode()
    fenced = "notes.md:\n```\nlevel 3\n```"
    assert second == {"type": "text", "text": f"{fenced}\n\nWhich digit is this?"}
    expect(attached).to_have_count(0)
    view.answered(1)
    shown = page.get_by_role("img", name="seven.png")
    assert shown.evaluate("e => e.decode().then(() => e.naturalWidth)") == 64

    view.reload()  # the conversation was stored with its picture
    with page.expect_download() as download:
        page.click("#export")
    view.delete("Which digit is this?")
    page.set_input_files("#import", download.value.path())
    view.titles.first.click()
    expect(shown).to_be_visible()
    later = view.body_of("Are you sure?")["messages"]
    assert later[0] == message
    assert later[2]["content"] == "Are you sure?"


def test_a_large_picture_is_scaled_down(view, page):
    clear = Image.new("RGBA", (3000, 6000), (0, 0, 0, 0))
    page.set_input_files("#attach", [WIDE, upload("clear.png", file_of(clear))])
    expect(page.locator("#attached li")).to_have_count(2)
    parts = view.body_of("")["messages"][0]["content"]
    wide, clear = map(picture_of, parts)  # without an empty text
    assert (wide.size, clear.size) == ((2048, 50), (1024, 2048))
    assert clear.getpixel((500, 500)) == (255, 255, 255)


def test_a_picture_that_is_dropped_or_pasted(view, page):
    page.evaluate(
        """(data) => {
          const files = new DataTransfer();
          const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
          files.items.add(new File([bytes], "a.png", {type: "image/png"}));
          document.activeElement.dispatchEvent(new ClipboardEvent("paste", {clipboardData: files}));
          window.chat.dispatchEvent(new DragEvent("drop", {dataTransfer: files}));
        }""",
        base64.b64encode(DIGIT["buffer"]).decode(),
    )
    expect(page.locator("#attached li img")).to_have_count(2)
    assert len(view.body_of("What differs?")["messages"][0]["content"]) == 3


def test_questions_after_one_that_failed_keep_their_pictures(view, page):
    page.unroute("**/v1/chat/completions")
    view.refuse("chat/completions", "no seat")
    page.set_input_files("#attach", DIGIT)
    expect(page.locator("#attached li")).to_have_count(1)
    view.ask("Which digit is this?")
    expect(view.problem).to_have_text("no seatTry again")
    page.unroute("**/v1/chat/completions")
    view.answer_with({"content": "It is a 7."})
    (message,) = view.body_of("And its colour?")["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text", "text"]

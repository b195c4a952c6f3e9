"""The chat in a real browser: answers, settings, files, errors."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.support.server.kit import serving
from tests.support.server.page_kit import USAGE, WIDE, until_idle
from vllm_metal_lite.server.settings import ServerConfig

pytestmark = pytest.mark.long


def test_a_chat_and_what_it_cost(view, page):
    assert "remember" in view.answer_to("Hi, my name is Ada and I parked my car on level 3.")
    view.text.first.evaluate("e => { e.firstChild.mark = 1; }")
    assert view.answer_to("Where is my car?") == "Your car is on level 3."
    assert view.text.first.evaluate("e => e.firstChild.mark") == 1  # not drawn again
    expect(page.locator("#send")).to_be_visible()
    assert "first after" in page.locator(".cost").last.inner_text()
    expect(page.locator(".message.user")).to_have_count(2)
    view.answer_with({"content": "Good."}, usage=USAGE)
    view.answer_to("How are you?")
    cost = page.locator(".cost").last.inner_text()
    assert re.search(r"1,812 tokens in \(1,600 cached\).*640 out", cost, re.S)


@pytest.mark.parametrize(
    "deltas",
    [
        [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Four."}],
        [{"reasoning": "Let me see."}, {"content": "Four."}],
    ],
)
def test_thoughts_are_folded_away(view, page, deltas):
    view.answer_with(*deltas)
    assert view.answer_to("two and two") == "Four."
    thoughts = page.locator(".thoughts")
    expect(thoughts).to_be_hidden()
    page.get_by_text("Thoughts").click()
    expect(thoughts).to_have_text("Let me see.")


def test_thoughts_that_never_end(view, page):
    view.answer_with({"reasoning_content": "hm"}, finish="length")
    assert view.answer_to("two and two") == ""
    expect(page.locator(".thoughts")).to_have_text("hm")
    expect(page.locator(".cost")).to_contain_text("cut off")


@pytest.mark.parametrize("text", ["<", "The tag is\n</think>\nand it closes."])
def test_text_that_looks_like_a_tag_of_thoughts_is_text(view, page, text):
    """The server splits thoughts from answers, and the page splits nothing again."""
    view.answer_with({"content": text})
    assert view.answer_to("Only the sign.").split() == text.split()
    assert view.body_of("Sure?")["messages"][1] == {"role": "assistant", "content": text}
    expect(page.locator(".thoughts")).to_have_count(0)


def test_stop_ends_the_request(view, page, running):
    view.change_requests("chat/completions", ignore_eos=True, temperature=1)
    view.ask("tell me a story")
    expect(view.text).not_to_be_empty()
    page.click("#stop")
    view.answered(1)
    expect(page.locator(".cost")).to_contain_text("stopped after")
    expect(page.locator("#send")).to_be_visible()
    until_idle(running, page)
    page.unroute_all()


def test_edit_and_ask_again_keeps_both(view, page):
    assert view.answer_to("Please reverse this list: red, green, blue") == "blue, green, red"
    page.get_by_label("Edit and ask again").click()
    assert page.get_by_label("Edit your message").bounding_box()["height"] < 60  # a line
    page.get_by_label("Edit your message").fill("Please reverse this list: one, two, three")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant[aria-busy=false] .text")).to_have_text(
        "three, two, one"
    )
    expect(page.locator(".message.user .version")).to_have_text("2 of 2")
    page.get_by_label("Previous version").click()
    expect(view.text).to_have_text("blue, green, red")
    # Again: the old answer stays beside the new one.
    page.get_by_label("Answer again").click()
    expect(page.locator(".message.assistant .version")).to_have_text("2 of 2")


def test_settings_are_sent(view, page):
    view.set(system="The code of the red box is 4821.", temperature="0", max_tokens="7")
    body = view.body_of("What is the code of the red box?")
    assert body["messages"][0] == {"role": "system", "content": "The code of the red box is 4821."}
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 7, True)
    assert "top_p" not in body
    view.answered(1)
    page.get_by_text("system prompt: The code of the red box").click()
    expect(page.locator("#set-temperature")).to_have_value("0")


def test_the_server_takes_every_setting(view, page):
    page.evaluate(
        """localStorage.setItem("metal-lite-defaults", '{"sampling": {"thinking": true}}')"""
    )
    view.reload()
    numbers = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    numbers["repetition_penalty"] = 1.1
    texts = {name: str(value) for name, value in numbers.items()}
    view.set(thinking="false", stop="one\ntwo", schema='{"enum": ["x"]', **texts)
    expect(page.locator("#set-schema:invalid")).to_be_visible()  # it is not saved
    page.fill("#set-schema", '{"enum": ["yes"]}')
    page.get_by_role("button", name="Save").click()
    body = view.body_of("hello")
    assert {name: body[name] for name in numbers} == numbers
    assert (body["stop"], body["reasoning_effort"]) == (["one", "two"], "none")
    assert view.answered(1) == '"yes"'
    view.set(thinking="true")
    body = view.body_of("hello")
    assert body["chat_template_kwargs"]["enable_thinking"] is True
    assert view.answered(2) == '"yes"'


def test_text_files_go_with_a_message(view, page):
    notes = {"name": "notes.md", "mimeType": "", "buffer": b"```\ncar: level 3\n```\n"}
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"}
    large = {"name": "large.md", "mimeType": "", "buffer": b"a" * (2**20 + 1)}
    page.set_input_files("#attach", [notes, picture, large])
    expect(page.locator("#problem-text")).to_have_text(
        "a.png is a picture, and this model reads text only. "
        "large.md has 1,048,577 bytes; the limit is 1,048,576."
    )
    expect(page.locator("#attached li")).to_have_text(["notes.md"])
    view.answer_with({"content": "Level 3."})
    body = view.body_of("Where is my car?")
    (message,) = body["messages"]
    fenced = "notes.md:\n````\n```\ncar: level 3\n```\n````"  # by more than the file holds
    assert message["content"] == f"{fenced}\n\nWhere is my car?"
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator("#problem")).to_be_hidden()
    page.get_by_text("notes.md").click()
    expect(page.locator(".attachment pre")).to_contain_text("car: level 3")
    page.get_by_label("Edit and ask again").click()
    page.get_by_label("Edit your message").fill("")  # the file alone
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    assert asked.value.post_data_json["messages"][0]["content"] == fenced


def test_a_message_waits_for_files_that_are_dropped_or_pasted(view, page):
    page.evaluate(
        """() => {
          const read = new Promise((resolve) => { window.read = resolve; });
          File.prototype.arrayBuffer = () => read;
          const files = new DataTransfer();
          files.items.add(new File([], "a.md"));
          document.activeElement.dispatchEvent(new ClipboardEvent("paste", {clipboardData: files}));
          window.chat.dispatchEvent(new DragEvent("drop", {dataTransfer: files}));
        }"""
    )
    view.ask("What is this?")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator(".message")).to_have_count(0)
    page.evaluate("() => read(new TextEncoder().encode('level 3').buffer)")
    expect(page.locator("#attached li")).to_have_text(["a.md", "a.md"])
    page.click("#send")
    expect(page.locator(".message.user .attachment")).to_have_count(2)


def test_an_error_is_said_and_can_be_tried_again(view, page):
    view.refuse("chat/completions", "264 requests run or wait, and max_waiting is 256")
    view.ask("hello")
    expect(view.problem).to_contain_text("max_waiting is 256")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    assert view.answered(1)
    expect(view.problem).to_have_count(0)


def test_after_a_restart_with_another_model_the_page_uses_that_one(view, page):
    view.answer_with({"content": "Good."}, usage=USAGE)
    view.answer_to("hello")
    view.refuse("chat/completions", "The model `demo` does not exist", status=404)
    view.refuse("models", "not yet")
    view.ask("and now?")
    expect(page.locator("#problem-text")).to_have_text(
        "The list of models could not be read. not yet"
    )
    other = {"id": "other", "max_model_len": 8192}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [other]}))
    page.click("#problem-again")
    expect(page.locator("#model option")).to_have_text(["other"])
    expect(page.locator("#context")).to_have_text("2,452 of 8,192 tokens of context")
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Try again").click()
    assert asked.value.post_data_json["model"] == "other"
    page.unroute_all()


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ([], "The answer was cut off."),
        (['{"error": {"message": "the engine has ended"}}'], "the engine has ended"),
    ],
)
def test_an_answer_that_breaks_off_keeps_what_came(view, page, last, words):
    chunk = {"choices": [{"index": 0, "delta": {"content": "Once upon"}, "finish_reason": None}]}
    view.answer_with_events(json.dumps(chunk), *last)
    assert view.answer_to("tell me a story") == "Once upon"
    expect(view.problem).to_contain_text(words)


def test_the_key_is_asked_for_until_it_is_right(open_page):
    with serving(config=ServerConfig(port=0, api_key="secret")) as running:
        view = open_page(url=running.url, opens=False, **WIDE)
        view.expect_complaints("401")
        page = view.page
        page.goto(running.url)
        for key in "wrong", "a–b", "secret":
            page.fill("#key-value", key)
            page.keyboard.press("Enter")
        view.ready()
        assert view.answer_to("hello")
        expect(page.locator("#legend li")).to_have_count(4)  # the view has the key too
        view.context.close()


def test_a_question_after_a_failed_one_keeps_roles_in_turns(view, page):
    view.expect_complaints("ERR_FAILED")
    page.route(re.compile("chat/completions|health"), lambda route: route.abort())
    view.ask("My name is Ada.")
    expect(view.problem).to_contain_text("does not answer")
    page.unroute_all()
    expect(view.problem).to_contain_text("it is back now.")
    body = view.body_of("What is my name?")
    assert body["messages"] == [{"role": "user", "content": "My name is Ada.\n\nWhat is my name?"}]
    view.answered(2)


def test_it_scrolls_along_only_at_the_end(open_page):
    view = open_page(viewport={"width": 700, "height": 400})
    page = view.page
    long = "\n\n".join(f"Paragraph {i}." for i in range(60))
    view.answer_with({"content": long})
    view.answer_to("write")
    expect(page.get_by_text("Paragraph 59.")).to_be_in_viewport()
    page.locator("#scroller").evaluate("e => { e.scrollTop = 0; }")
    expect(page.locator("#to-end")).to_be_visible()
    view.text.evaluate("e => { e.append('more'); return new Promise(requestIdleCallback); }")
    assert page.locator("#scroller").evaluate("e => e.scrollTop") == 0
    page.click("#to-end")
    expect(page.get_by_text("Paragraph 59.")).to_be_in_viewport()
    page.locator("#scroller").evaluate("e => { e.scrollTop = 0; }")
    page.fill("#prompt", "a line\n" * 20)
    to_end, composer = (page.locator(name).bounding_box() for name in ("#to-end", "#composer .box"))
    assert to_end["y"] + to_end["height"] <= composer["y"]


def test_send_is_enabled_while_there_is_something_to_send(view, page):
    send = page.locator("#send")
    expect(send).to_be_disabled()
    page.fill("#prompt", "  \n")
    expect(send).to_be_disabled()
    page.fill("#prompt", "hello")
    ready = send.evaluate("e => getComputedStyle(e).backgroundColor")
    page.set_input_files("#attach", {"name": "a.md", "mimeType": "", "buffer": b"a"})
    expect(page.locator("#attached li")).to_have_count(1)
    page.fill("#prompt", "")
    expect(send).to_be_enabled()  # the file alone
    page.get_by_label("Remove a.md").click()
    expect(send).to_be_disabled()
    expect(send).not_to_have_css("background-color", ready)


def test_a_model_of_embeddings_is_not_for_chats(open_page):
    view = open_page(opens=False)
    names = {"org/Embed-1B": "embedding", "org/Chat-1B": "completion", "a/Twin": "completion"}
    names["b/Twin"] = "completion"
    data = [{"id": name, "capabilities": [kind]} for name, kind in names.items()]
    view.page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
    view.open()
    options = view.page.locator("#model option")
    expect(options).to_have_text(["Embed-1B (no chat)", "Chat-1B", "a/Twin", "b/Twin"])
    expect(options.first).to_be_disabled()
    expect(view.page.locator("#model")).to_have_value("org/Chat-1B")
    view.answer_with({"content": "Good."})
    assert view.body_of("hello")["model"] == "org/Chat-1B"
    view.answered(1)
    del data[1:]
    view.reload()
    expect(view.page.locator("#problem-text")).to_contain_text("No model of this server chats")
    view.page.fill("#prompt", "hello")
    expect(view.page.locator("#send")).to_be_disabled()


def test_the_examples_suit_the_model_that_is_chosen(open_page):
    view = open_page(opens=False)
    sees = {"id": "eyes", "root": "org/eyes", "input_modalities": ["text", "image"]}
    data = [{"id": "tiny", "root": "demo"}, {"id": "big", "root": "org/big"}, sees]
    view.page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
    view.open()
    found = {}
    for name in "tiny", "big", "eyes":
        view.page.select_option("#model", name)
        found[name] = view.page.locator("#examples button").all_inner_texts()
    assert found["tiny"][0].startswith("Hi, my name is Ada")
    assert not set(found["tiny"]) & set(found["big"])
    with view.page.expect_file_chooser():
        view.page.get_by_role("button", name="What is in this picture?").click()
    expect(view.page.locator("#prompt")).to_have_value("What is in this picture?")

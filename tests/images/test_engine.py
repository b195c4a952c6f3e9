"""An engine caches, cuts, drafts, restores and refuses requests with pictures."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from tests.support.engine.guesses import Guesses
from tests.support.engine.pool_accounts import check_accounts
from tests.support.images import seeing
from tests.support.images.drawn import READER, base64_of, file_of
from tests.support.images.seeing import IMAGE, picture, prompt, words
from tests.support.models import tiny_models as tiny
from tools.demo_model.train_reader import COLOURS, draw
from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.batch.pictures import PlacedPictures
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.images.eyes import attach
from vllm_metal_lite.prefix_disk import folder, reader
from vllm_metal_lite.prefix_disk.parts import Parts
from vllm_metal_lite.scheduler.prefix_hash import extend_block_names

GREEDY = tiny.greedy(8, ignore_eos=True)
START, END = words(1, 11), words(2, 9)
A, B = picture(1, 3, 5), picture(2, 3, 5)
# Two prompts of equal tokens; the first picture starts at token 11, in the second block of 8.
WITH_A, WITH_B = prompt(START, A, END), prompt(START, B, END)


def answer(engine: Any, asked: dict[str, Any]) -> tuple[list[int], int]:
    """(tokens, cached tokens of the prompt)"""
    output = tiny.ask(engine, asked, GREEDY)
    return output.outputs[0].token_ids, output.num_cached_tokens


# A model that reads


def ask(pixels: Any, question: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_pil", "image_pil": pixels}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def questions(count: int) -> tuple[list[Any], list[str]]:
    rng, asked, answers = random.Random(5), [], []
    for i in range(count):
        digit, colour = rng.randrange(10), rng.choice(list(COLOURS))
        question = ("Which digit is this?", "Name the colour.")[i % 2]
        asked.append(ask(draw(digit, colour, rng), question))
        answers.append((f"It is a {digit}.", f"It is {colour}.")[i % 2])
    return asked, answers


def reading(**options: Any) -> LLM:
    return LLM(str(READER), max_model_len=512, num_blocks=128, **options)


def texts(llm: LLM, conversations: list[Any]) -> list[str]:
    outputs = llm.chat(conversations, SamplingParams(max_tokens=16, temperature=0))
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},  # pictures of 19 tokens are cut
        {"kv_bits": 8},
        {"speculate": "off", "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_a_model_reads_digits_and_colours(options: dict[str, Any]) -> None:
    asked, expected = questions(8)
    assert texts(reading(**options), asked) == expected
    assert len(set(expected)) > 4


def test_a_picture_is_read_from_any_door() -> None:
    """A URL, an array, a file's bytes, a Pillow image; as a message, a text and token ids."""
    llm, pixels = reading(), draw(7, "blue", random.Random(1))
    image = Image.fromarray(pixels)
    url = f"data:image/png;base64,{base64_of(image)}"
    question = {"type": "text", "text": "Which digit is this?"}
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}}]
    parts += [{"type": "image_pil", "image_pil": image}, {"type": "image", "image": pixels}]
    asked = [[{"role": "user", "content": [part, question]}] for part in parts]
    assert texts(llm, asked) == ["It is a 7."] * 3
    text, params = "<s>[INST][IMG]Which digit is this?[/INST]", SamplingParams(max_tokens=16)
    seen = [{"prompt": text, "multi_modal_data": {"image": x}} for x in (file_of(image), [image])]
    outputs = llm.generate(seen, params)
    ids = outputs[0].prompt_token_ids
    seen = [{"prompt_token_ids": ids, "multi_modal_data": {"image": pixels}}]
    outputs += llm.generate(seen, params)
    assert [output.outputs[0].text for output in outputs] == ["It is a 7."] * 3


def test_each_picture_of_a_conversation_is_the_right_one() -> None:
    """Two pictures of one size, in both orders, over one cache."""
    llm, rng = reading(), random.Random(3)
    pixels = {digit: draw(digit, "green", rng) for digit in (2, 9)}
    for first, second in ((2, 9), (9, 2), (9, 9), (2, 2)):
        said = {"role": "assistant", "content": f"It is a {first}."}
        turns = [ask(pixels[digit], "Which digit is this?") for digit in (first, second)]
        assert texts(llm, [turns[0]]) == [said["content"]]
        assert texts(llm, [[*turns[0], said, *turns[1]]]) == [f"It is a {second}."]


# Names and caches


def test_the_same_text_with_another_picture_hits_nothing_of_it() -> None:
    engine, alone = seeing.engine(), seeing.engine()
    first, cached = answer(engine, WITH_A)
    assert cached == 0
    other, cached = answer(engine, WITH_B)
    assert cached == 8  # the block before the picture's first
    assert other == answer(alone, WITH_B)[0] != first
    assert answer(engine, WITH_A) == (first, 32)
    assert answer(engine, WITH_B) == (other, 32)
    assert engine.eyes.num_looks == 2


def test_without_digests_in_names_another_picture_would_hit() -> None:
    """The control."""
    with patch.object(PlacedPictures, "extra_name", lambda *_: b""):
        engine = seeing.engine()
        first, _ = answer(engine, WITH_A)
        assert answer(engine, WITH_B) == (first, 32)


def test_names_of_blocks_with_rows_of_a_picture_differ() -> None:
    names: list[list[bytes]] = []
    for asked in (WITH_A, WITH_B, {"prompt_token_ids": WITH_A["prompt_token_ids"]}):
        tokens = asked["prompt_token_ids"]
        pictures = asked.get("multi_modal_data", {}).get("image")
        placed = seeing.eyes_of("qwen3_vl").place(tokens, pictures) if pictures else None
        names.append([])
        extend_block_names(names[-1], tokens, 8, 4, None, placed and placed.extra_name)
    assert [len(set(of_block)) for of_block in zip(*names, strict=True)] == [1, 3, 3, 3]


def test_a_second_turn_runs_no_tower_and_looks_at_no_picture() -> None:
    engine = seeing.engine()
    said, _ = answer(engine, WITH_A)
    assert (engine.eyes.num_looks, engine.eyes.tower.num_runs) == (1, 1)
    turn = prompt(START, A, END, said, words(3, 6))
    tokens, cached = answer(engine, turn)
    assert cached == 40  # of 35 + 7 tokens that were computed
    assert (engine.eyes.num_looks, engine.eyes.tower.num_runs) == (1, 1)
    assert tokens == answer(seeing.engine(), turn)[0]


def test_a_hit_within_a_picture_computes_the_rest_of_it() -> None:
    engine, shorter = seeing.engine(), prompt(START, A)
    answer(engine, shorter)
    tokens, cached = answer(engine, WITH_A)
    assert cached == 24  # the picture ends at 26
    assert tokens == answer(seeing.engine(), WITH_A)[0]
    assert engine.eyes.tower.num_runs == 1  # its features are kept


def test_pictures_in_another_order_are_another_prompt() -> None:
    engine = seeing.engine()
    one, other = prompt(START, A, B, END), prompt(START, B, A, END)
    found = [answer(engine, asked) for asked in (one, other)]
    assert [cached for _, cached in found] == [0, 8]
    assert found[0][0] != found[1][0]
    assert [tokens for tokens, _ in found] == [
        answer(seeing.engine(), asked)[0] for asked in (one, other)
    ]


# Steps


@pytest.mark.parametrize("name", seeing.NAMES)
def test_drafts_behind_pictures_change_no_token(name: str) -> None:
    asked, params = [WITH_A, WITH_B, prompt(words(5, 20))], tiny.greedy(24, ignore_eos=True)
    expected = tiny.answers(seeing.engine(name), asked, params)
    engine = seeing.engine(name, speculate="auto")
    truth = {str(i): tokens for i, tokens in enumerate(expected)}
    engine.in_flight.speculator = Guesses(engine, truth, seed=1)
    assert tiny.answers(engine, asked, params) == expected
    assert engine.metrics()["draft_tokens"] > engine.metrics()["accepted_tokens"] > 10


@pytest.mark.parametrize("name", seeing.NAMES)
def test_quantised_rows_answer_alike_whole_and_in_chunks(name: str) -> None:
    params = tiny.greedy(8, ignore_eos=True, prompt_logprobs=1)
    asked = [WITH_A, WITH_B]
    exact = [seeing.scores_of(o) for o in tiny.outputs(seeing.engine(name), asked, params)]
    away = np.abs(exact[0] - exact[1])[-len(END) + 1 :].mean()
    for options in {}, {"max_num_batched_tokens": 16}:
        engine = seeing.engine(name, kv_bits=8, **options)
        for output, scores in zip(tiny.outputs(engine, asked, params), exact, strict=True):
            found = seeing.scores_of(output)
            assert 0 < np.abs(found - scores).mean() < away / 4


def test_one_picture_starts_in_a_step() -> None:
    """Requests beside wait for the tower once a step, and text goes ahead."""
    engine = tiny.run_ahead(seeing.engine(), ahead=False)
    asked = [WITH_A, prompt(START, B, picture(3, 2, 2)), prompt(words(5, 20))]
    tiny.submit(engine, asked, GREEDY)
    runs, lengths = [0], []
    while engine.has_unfinished_requests():
        outputs = {o.request_id: len(o.outputs[0].token_ids) for o in engine.step()}
        runs.append(engine.eyes.tower.num_runs)
        lengths.append(outputs.get("2", 0))
    assert np.diff(runs).max() == 1
    assert runs[:4] == [0, 1, 2, 3]  # each step has room for all of them
    assert lengths[1] > 0


def test_a_request_is_aborted_in_the_middle_of_a_picture() -> None:
    engine = tiny.run_ahead(seeing.engine(max_num_batched_tokens=16), ahead=False)
    engine.add_request("gone", WITH_A, GREEDY)
    engine.step()
    [gone] = engine.scheduler.running
    assert gone.num_computed_tokens == 16  # the picture is at 11 to 26
    engine.abort("gone")
    tiny.run(engine)
    check_accounts(engine.scheduler.kv, ())
    tokens, cached = answer(engine, WITH_A)
    assert cached == 16
    assert tokens == answer(seeing.engine(), WITH_A)[0]


def test_a_prefix_with_a_picture_survives_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Parts, "min_tokens", 8)
    monkeypatch.setattr(folder.Folder, "free_margin", 0)  # the disk of a test machine may be full
    monkeypatch.setattr(reader, "_MIN_ROWS", 8)
    monkeypatch.setattr(reader, "_READ", 1e18)  # reading is preferred, whatever the speed here
    expected = [answer(seeing.engine(), asked)[0] for asked in (WITH_A, WITH_B)]
    engine = seeing.engine(prefix_disk_gib=1)
    for _ in range(2):  # a prefix is written when it is used again
        assert answer(engine, WITH_A)[0] == expected[0]
    while engine.rest():
        pass
    engine.prefix_disk.writer.flush()
    engine = seeing.engine(prefix_disk_gib=1)
    other = tiny.ask(engine, WITH_B, GREEDY)
    assert other.outputs[0].token_ids == expected[1]
    assert other.num_cached_tokens <= 8
    same = tiny.ask(engine, WITH_A, GREEDY)
    assert same.outputs[0].token_ids == expected[0]
    assert same.num_cached_tokens == 32
    assert same.num_restored_tokens >= 24
    assert engine.eyes.tower.num_runs == 1  # for the other picture
    retrained = tiny.ask(seeing.engine(prefix_disk_gib=1, tower=1), WITH_A, GREEDY)
    assert retrained.num_restored_tokens == 0
    assert retrained.outputs[0].token_ids != expected[0]


# Refusals


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"video": [1]}, r"multi_modal_data must be .*got \{.*video"),
        ([A], "multi_modal_data must be"),
        ({"image": ["https://example.org/a.png"]}, "must be data:image.*example.org"),
        ({"image": ["data:image/png;base64,?"]}, "is no base64"),
        ({"image": [b"GIF89a"]}, "the picture of 6 bytes cannot be decoded"),
        ({"image": 7}, "a picture must be .*got 7"),
        ({"image": [np.zeros((4, 4), np.uint8)]}, "a picture must be"),
        ({"image": [A, B]}, r"has 15 image tokens \(7\), and the 2 pictures have 30 rows"),
        ({"image": [picture(3, 2, 2)]}, r"has 15 image tokens \(7\), and the 1 pictures have 4"),
        ({"image": [A] * 101}, r"at most 100 pictures \(limit_mm_per_prompt\), got 101"),
    ],
)
def test_wrong_pictures_are_refused_in_one_line(data: Any, words: str) -> None:
    engine = seeing.engine()
    with pytest.raises(RequestError, match=words) as error:
        engine.add_request("r", {**WITH_A, "multi_modal_data": data}, GREEDY)
    assert "\n" not in str(error.value)
    assert not engine.has_unfinished_requests()


def test_a_model_without_eyes_says_so() -> None:
    with pytest.raises(RequestError, match="llama takes text only"):
        tiny.engine().add_request("r", WITH_A, GREEDY)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gemma3n"}, "not served for gemma3n: its vision tower is a convolutional"),
        (
            {"model_type": "qwen3_vl", "vision_config": {"depth": "x"}},
            "no key 'spatial_merge_size'",
        ),
    ],
)
def test_a_model_whose_tower_cannot_be_read_answers_text(
    config: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged, and loading continues."""
    model: Any = SimpleNamespace(name="m", folder=None, config={"vision_config": {}, **config})
    with caplog.at_level("WARNING", "vllm_metal_lite"):
        eyes = attach(model, 1)
    assert eyes.reason.startswith("m takes no pictures here: ")
    assert why in eyes.reason
    assert eyes.reason in caplog.text


def test_a_part_without_its_picture_is_refused() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url"}]}]
    with pytest.raises(RequestError, match=r"a picture must be a Pillow image.*, got None"):
        reading().chat(messages)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_prompt_has_at_most_as_many_pictures_as_the_option_says(limit: int) -> None:
    """If no picture is allowed, no tower is loaded."""
    llm, pixels = reading(limit_mm_per_prompt={"image": limit}), draw(7, "red", random.Random(1))
    eyes = llm.engine.eyes
    assert bool(eyes.weights) == (eyes.num_bytes > 0) == (limit > 0)
    asked = ask(pixels, "Which digit is this?")
    why = "takes no pictures here: limit_mm_per_prompt is 0"
    if limit:
        assert texts(llm, [asked]) == ["It is a 7."]
        asked, why = asked * 3, r"at most 2 pictures \(limit_mm_per_prompt\), got 3"
    with pytest.raises(RequestError, match=why):
        llm.chat(asked)


def test_a_picture_larger_than_a_step_is_refused_where_it_must_not_be_cut() -> None:
    asked = prompt(START, picture(4, 5, 6), END)
    with pytest.raises(RequestError, match=r"span from 11 to 41, 30 tokens; .* at most 16"):
        seeing.engine("gemma3", max_num_batched_tokens=16).add_request("r", asked, GREEDY)
    engine = seeing.engine(max_num_batched_tokens=16)
    assert answer(engine, asked)[0] == answer(seeing.engine(), asked)[0]
    assert IMAGE in asked["prompt_token_ids"]

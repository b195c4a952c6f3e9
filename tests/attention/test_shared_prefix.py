"""Which decodes share a prefix, and whole engines whose decodes do."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal.host import installed
from tests.support.attention.array_attention import compile_on_cpu
from tests.support.attention.cases import BLOCK_SIZE, make_batch
from tests.support.kernels.device import change_device, checks_find, pad_to_powers_of_two
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import backend
from vllm_metal_lite.attention.paged import decodes
from vllm_metal_lite.attention.paged.decodes import PrefixSearch, find_shared_prefix
from vllm_metal_lite.engine import steps_in_flight
from vllm_metal_lite.kernels.registry import Verdict

DECODES = make_batch([(0, 1)])


# Rows are words of few letters, so that many begin alike; a letter is a block.
@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.integers(1, 8)), max_size=9),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_the_prefix_that_saves_most_is_found(rows, fewest, groups):
    with pytest.MonkeyPatch.context() as patch:
        change_device(patch, prefix_row_cost=0)
        # A block's number tells what is before it too, as in a cache of prefixes.
        names = {word[:i] for word, _ in rows for i in range(1, len(word) + 1)}
        blocks = {name: i for i, name in enumerate(sorted(names))}
        tables = np.full((len(rows), 6), -1, np.int32)
        for table, (word, _) in zip(tables, rows, strict=True):
            table[: len(word)] = [blocks[word[:i]] for i in range(1, len(word) + 1)]
        least = fewest * BLOCK_SIZE
        lens = [(len(word) - 1) * BLOCK_SIZE + n for word, n in rows]
        found = find_shared_prefix([tables] * groups, np.array(lens, np.int32), BLOCK_SIZE, least)

    own = [word[:-1] for word, _ in rows]  # the last block is written to
    saved = {
        name: (sum(word.startswith(name) for word in own) - 1) * len(name)
        for word in own
        for name in (word[:i] for i in range(1, len(word) + 1))
    }
    if found is None:
        assert max(saved.values(), default=0) < fewest
        return
    length = found.lens[found.leader] // BLOCK_SIZE
    prefix = own[found.leader][:length]
    assert saved[prefix] >= fewest
    assert found.lens.tolist() == [
        length * BLOCK_SIZE if word.startswith(prefix) else 0 for word in own
    ]


def test_a_prefix_is_as_long_as_the_groups_of_layers_agree():
    groups = [[1, 2, 3, 4], [1, 2, 3, 5]], [[6, 7, 8, 9], [6, 7, 5, 4]]
    tables = [np.array(rows, np.int32) for rows in groups]
    found = find_shared_prefix(tables, np.array([30, 30]), BLOCK_SIZE, 8)
    assert (found.leader, found.lens.tolist()) == (0, [16, 16])


def test_rows_that_do_not_have_the_prefix_cost_something():
    tables = np.arange(48, dtype=np.int32).reshape(16, 3)
    tables[3, :2] = tables[9, :2]
    lens = np.full(16, 20)
    assert find_shared_prefix([tables], lens, BLOCK_SIZE, 8) is None
    tables[[5, 7, 11], :2] = tables[9, :2]
    found = find_shared_prefix([tables], lens, BLOCK_SIZE, 8)
    assert np.flatnonzero(found.lens).tolist() == [3, 5, 7, 9, 11]
    assert found.leader == 3


STEP = st.one_of(
    st.just("decode"),
    st.tuples(st.just("add"), st.text("ab", min_size=1, max_size=5)),
    st.tuples(st.just("remove"), st.integers(0, 9)),
)


@given(st.lists(STEP, max_size=30), st.integers(1, 3))
def test_a_prefix_that_is_remembered_is_still_one(changes, fewest):
    """Rows come, go and grow, a token or a block at a time; tables have stale blocks behind."""
    search, rows, least = PrefixSearch([0]), [], fewest * BLOCK_SIZE
    names: dict[str, int] = {}
    for change in changes:
        if change == "decode":
            for row in rows:
                row[1] += 5
                row[0] += "c" * (-(-row[1] // BLOCK_SIZE) - len(row[0]))
        elif change[0] == "add":
            rows.append([change[1], len(change[1]) * BLOCK_SIZE - 2])
        elif rows:
            rows.pop(change[1] % len(rows))
        if not rows:
            continue
        tables = np.full((len(rows), max(len(word) for word, _ in rows) + 1), -1, np.int32)
        for i, (word, _) in enumerate(rows):
            for at in range(len(word)):  # what is generated is nobody else's
                key = word[: at + 1] + str(i) * ("c" in word[: at + 1])
                tables[i, at] = names.setdefault(key, len(names))
        lens = np.array([n for _, n in rows], np.int32)
        batch = replace(DECODES, block_tables=tables[None], seq_lens=lens, num_decodes=len(lens))
        found = search(batch, least)
        if change != "decode":
            other = find_shared_prefix([tables], lens, BLOCK_SIZE, least)
            assert (found is None) == (other is None)
        if found is None:
            continue
        blocks = int(found.lens.max()) // BLOCK_SIZE
        having = np.flatnonzero(found.lens)
        assert blocks >= 1
        assert found.leader in having
        assert len(having) > 1
        assert (found.lens[having] == blocks * BLOCK_SIZE).all()
        assert (found.lens <= (lens - 1) // BLOCK_SIZE * BLOCK_SIZE).all()
        assert (tables[having, :blocks] == tables[found.leader, :blocks]).all()


# Whole engines


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    checks_find(monkeypatch, Verdict({}, "gather"))


@pytest.fixture
def steps(monkeypatch):
    """The prefix of each step's decodes, or None; every possible prefix is shared."""
    change_device(monkeypatch, min_saved_tokens=BLOCK_SIZE)
    found = []

    class Recording(PrefixSearch):
        def __call__(self, *args):
            found.append(super().__call__(*args))
            return found[-1]

    monkeypatch.setattr(decodes, "PrefixSearch", Recording)
    return found


@pytest.fixture
def on_kernels():
    with installed() if backend.is_cpu() else nullcontext():
        yield


def engine_of(name, attention="kernels", **options):
    return tiny.engine(name, attention=attention, block_size=BLOCK_SIZE, **options)


def rotated_twice_as_far(batch, *_):
    return replace(batch, rotary_positions=2 * batch.positions)


PREFIX = tiny.prompts(1, 40, 40, seed=3)[0]
OTHERS = tiny.prompts(4, 1, 20, seed=4)


@pytest.mark.parametrize("length", [7, 8, 9, 23, 24, 25])
def test_tokens_are_those_without_sharing(on_kernels, steps, monkeypatch, length):
    prompts = [PREFIX[:length] + rest for rest in OTHERS[:3]] + [OTHERS[3]]
    got = tiny.answers(engine_of("llama"), prompts, 10)
    lens = {int(s.lens.max()) for s in steps if s}
    assert lens == ({length // 8 * 8} if length >= 8 else set())
    assert all(np.count_nonzero(s.lens) <= 3 for s in steps if s)
    change_device(monkeypatch, min_saved_tokens=1 << 30)
    steps.clear()
    assert tiny.answers(engine_of("llama"), prompts, 10) == got
    assert not any(steps)
    assert tiny.answers(engine_of("llama", "reference"), prompts, 10) == got


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {}),
        ("gemma2", {}),
        ("llama/window", {}),
        ("gpt_oss", {}),
        ("llama", {"kv_bits": 8}),
        ("qwen3", {"num_blocks": 14, "max_num_batched_tokens": 16}),
    ],
    ids=str,
)
def test_other_layers(on_kernels, steps, name, options):
    """Norms and rotations in kernels, softcaps, windows, sinks, quantised stores; chunks, mixed
    steps and preemptions."""
    prompts = [PREFIX[:26] + rest for rest in OTHERS]
    expected = tiny.answers(engine_of(name, "reference", **options), prompts, 10)
    assert tiny.answers(engine_of(name, **options), prompts, 10) == expected
    assert any(steps)


def test_rows_rotated_by_other_positions(on_kernels, steps, monkeypatch):
    """Behind pictures a row's position differs from its place in the sequence."""
    prompts = [PREFIX[:26] + rest for rest in OTHERS]
    plain = tiny.answers(engine_of("qwen3", "reference"), prompts, 10)
    monkeypatch.setattr(steps_in_flight, "with_pictures", rotated_twice_as_far)
    expected = tiny.answers(engine_of("qwen3", "reference"), prompts, 10)
    assert expected != plain
    steps.clear()
    assert tiny.answers(engine_of("qwen3"), prompts, 10) == expected
    assert any(steps)


# Compiled


@pytest.mark.parametrize("far", [False, True])
def test_compiled_steps_that_share(steps, monkeypatch, far):
    """Through ArrayAttention, which takes the blocks of the prefix from the leader.  far: rows are
    rotated by other positions, as behind pictures."""
    if far:
        monkeypatch.setattr(steps_in_flight, "with_pictures", rotated_twice_as_far)
    pad_to_powers_of_two(monkeypatch)
    change_device(monkeypatch, rows_as_decodes=0)
    prompts = [PREFIX[:26] + rest for rest in OTHERS] + [OTHERS[3]]
    options = {"max_num_batched_tokens": 24, "block_size": BLOCK_SIZE}
    expected = tiny.answers(tiny.engine("qwen3", **options), prompts, 24)
    engine = compile_on_cpu(tiny.engine("qwen3", **options))
    assert tiny.answers(engine, prompts, 24) == expected
    assert engine.metrics()["compiled_steps"] > 10
    assert any(steps)
    assert not all(steps)
    assert engine.runner.compiled.reason is None

"""The tables of the demo model's training data, and random words."""

import ast
import json
import random
import re
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("tables.json").read_text("utf-8"))
WORDS: dict[str, list[str]] = TABLES["words"]

ADJECTIVES = WORDS["ADJECTIVES"]
ANIMALS = WORDS["ANIMALS"]
CITIES = WORDS["CITIES"]
COLOURS = WORDS["COLOURS"]
DAYS = WORDS["DAYS"]
EVENTS = WORDS["EVENTS"]
FOODS = WORDS["FOODS"]
GROUPS = WORDS["GROUPS"]
JOBS = WORDS["JOBS"]
KIN = WORDS["KIN"]
MONTHS = WORDS["MONTHS"]
NAMES = WORDS["NAMES"]
PLACES = WORDS["PLACES"]
SURNAMES = WORDS["SURNAMES"]
THINGS = WORDS["THINGS"]


def pseudo_word(rng: random.Random) -> str:
    return "".join(
        "".join(rng.choice(WORDS[part]) for part in ("ONSETS", "VOWELS", "CODAS"))
        for _ in range(rng.choice((1, 2, 2, 2, 3)))
    )


def digits(rng: random.Random, low: int, high: int) -> str:
    """A random string of digits whose length lies between `low` and `high`."""
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(low, high)))


@cache
def english() -> tuple[str, ...]:
    """Plain English sentences: the docstrings of Python's own standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for path in sorted(
        [*folder.glob("*.py"), *folder.glob("asyncio/*.py"), *folder.glob("email/*.py")]
    ):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                for sentence in re.split(r"(?<=[.!?]) ", text):
                    if 20 < len(sentence) < 140 and re.fullmatch(
                        r"[A-Z][A-Za-z0-9 ,.'()-]+\.", sentence
                    ):
                        found[sentence] = None
    return tuple(found)


@cache
def common_words() -> tuple[str, ...]:
    """The English words that occur at least twice in `english()`."""
    counts: dict[str, int] = {}
    for sentence in english():
        for word in re.findall(r"[a-z]{3,11}", sentence):
            counts[word] = counts.get(word, 0) + 1
    return tuple(sorted(word for word, count in counts.items() if count > 1))


def any_word(rng: random.Random) -> str:
    """A known word, a common English word or a made-up one."""
    choice = rng.random()
    if choice < 0.4:
        return rng.choice(rng.choice((THINGS, FOODS, ANIMALS, COLOURS, PLACES)))
    return rng.choice(common_words()) if choice < 0.7 else pseudo_word(rng)

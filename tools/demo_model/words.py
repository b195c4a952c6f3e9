"""The tables of the demo model's training data, random words, and templates of words."""

import ast
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("tables.json").read_text("utf-8"))
WORDS: dict[str, list[str]] = TABLES["words"]

# Keys and values of facts.  "|" separates alternatives; a repeated one is likelier; see `fill`.
TEMPLATES = {
    "thing": "{ADJECTIVES} {THINGS}|" * 7 + "{THINGS}|{ADJECTIVES} {word}|{word}",
    "some_thing": "the {thing}|the {thing}|my {thing}",
    "person": "{NAMES}|" * 8 + "{NAMES} {SURNAMES}|{Pseudo}|{GROUPS} {Word}",
    "kin": "{KIN}|{ANIMALS}",
    "plural": "{ANIMALS}s|{THINGS}s",
    "event": "meeting with {person}|call with {person}|dinner with {person}|flight to {CITIES}|"
    "train to {CITIES}|{ADJECTIVES} {EVENTS}|{DAYS} {EVENTS}|{EVENTS}|{EVENTS}",
    "strong": "{4}|{4}|{word} {word}|{NAMES} {SURNAMES}",  # cannot be guessed
    "any": "{strong}|" * 5 + "{1-7}|{token}|{pseudo}|{Pseudo}|the {ADJECTIVES} {word}|{word}|{odd}",
    "token": "{caps}-{1-4}|{caps}{1-4}|{word}{1-3}",
    "odd": "{letters}|{word}-{word}|{word}-{1-4}|{word}_{word}|{1-4}.{word}|{word}{letters}|"
    "{word}/{1-4}-{word}",
    "name": "{NAMES}|" * 7 + "{NAMES} {SURNAMES}|{Pseudo}|{Pseudo}",
    "anything": "{any}|{any}|{name}",
    "city": "{CITIES}|" * 4 + "{Pseudo}",
    "job": "a {JOBS}",
    "like": "{FOODS}|{FOODS}|{FOODS}|{ADJECTIVES} {FOODS}|{ANIMALS}s|{word}",
    "where": "in|in|under|behind|on|near|at|next to",
    "level": "on level {n99}|on floor {n99}|in row {n99}|in room {n99}",
    "place": "{where} the {PLACES}|{where} the {ADJECTIVES} {PLACES}|" * 3
    + "{where} the {word}|{where} {CITIES}|{level}",
    "hour": "at {n23}:{n5}{1}",
    "day": "tomorrow|today|on {DAYS}|on {n31} {MONTHS}",
    "time": "{hour}|" * 5 + "at {n12} pm|at {n12} am|at {n12} o clock|{day}|{day} {hour}",
    "age": "{n99} years old",
    "count": "{n99}",
    "price": "{n9999} coins|{n9999} dollars|{n9999} euros",
}
# Values that suit an attribute with one of these words in it; the first that fits.
_NATURAL = {
    "colo": "{COLOURS}",
    "favou?rite number|lucky|age|seat|room|weight": "{1-3}",
    "name|owner|king|queen|president|mayor|founder": "{NAMES}|{SURNAMES}|{Pseudo}",
    "code|number|pin|key|budget|card": "{4}|{4}|{2-8}",
    "shopping": "{FOODS}, {FOODS}|{FOODS}, {FOODS}, {FOODS}",
    "city|capital|town": "{CITIES}",
    "food": "{FOODS}",
    "animal|mascot": "{ANIMALS}",
    "birthday|deadline": "{n31} {MONTHS}|{MONTHS} {n31}|the {n31}th of {MONTHS}",
    "email": "{word}@{word}.com",
}


def natural_value(rng: random.Random, attribute: str) -> str:
    """A value that suits an attribute (mostly)."""
    found = (template for parts, template in _NATURAL.items() if re.search(parts, attribute))
    return fill(rng, "{any}" if rng.random() < 0.3 else next(found, "{any}"))


def fill(rng: random.Random, template: str, words: dict[str, list[str]] = WORDS) -> str:
    """One of the template's alternatives, its slots filled.

    A slot names one of `words`, of TEMPLATES or of _MADE; {2-5} means 2 to 5 digits, {n99} for
    a number from 1 to 99, and {Word} a {word} with a capital.  words: WORDS, or fewer of some.
    """

    def slot(match: re.Match[str]) -> str:
        name = match[1]
        if name[0].isdigit():
            return _string(rng, "0123456789", int(name[0]), int(name[-1]))
        if name[0] == "n" and name[1:].isdigit():
            return str(rng.randint(1, int(name[1:])))
        if name in words:
            return rng.choice(words[name])
        if name in TEMPLATES:
            return fill(rng, TEMPLATES[name], words)
        made = _MADE[name.lower()](rng)
        return made.capitalize() if name[0].isupper() else made

    text = re.sub(r"{([\w-]+)}", slot, rng.choice(template.split("|")))
    return re.sub(r"\ba (?=[aeiou])", "an ", text)


def _string(rng: random.Random, pool: str, low: int, high: int) -> str:
    return "".join(rng.choice(pool) for _ in range(rng.randint(low, high)))


def pseudo_word(rng: random.Random) -> str:
    syllables = rng.choice((1, 2, 2, 2, 3))
    return "".join(fill(rng, "{ONSETS}{VOWELS}{CODAS}") for _ in range(syllables))


@cache
def english() -> tuple[str, ...]:
    """Plain English sentences: the docstrings of Python's own standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for path in sorted(
        file for part in ("", "asyncio/", "email/") for file in folder.glob(f"{part}*.py")
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
    counts = Counter(re.findall(r"[a-z]{3,11}", "\n".join(english())))
    return tuple(sorted(word for word, count in counts.items() if count > 1))


def any_word(rng: random.Random) -> str:
    """A known word, a common English word or a made-up one."""
    choice = rng.random()
    if choice < 0.4:
        return fill(rng, "{THINGS}|{FOODS}|{ANIMALS}|{COLOURS}|{PLACES}")
    return rng.choice(common_words()) if choice < 0.7 else pseudo_word(rng)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MADE: dict[str, Callable[[random.Random], str]] = {
    "word": any_word,
    "pseudo": pseudo_word,
    "letters": lambda rng: _string(rng, 3 * _LETTERS + _LETTERS.upper() + 2 * "0123456789", 2, 7),
    "caps": lambda rng: _string(rng, _LETTERS.upper(), 1, 3),
}

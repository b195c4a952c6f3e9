"""Small talk and small skills for the demo model: (user, assistant) pairs that need no memory."""

import random

from tools.demo_model import words as w

FALLBACK: str = w.TABLES["fallback"]
_NAMES = ("FOODS", "ANIMALS", "COLOURS", "NAMES", "THINGS", "CITIES", "PLACES")
_LISTS = [w.WORDS[name] for name in _NAMES]


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A greeting, thanks, or a question about the model itself."""
    talk = rng.choice(w.TABLES["talk"])
    text, reply = rng.choice(talk["said"]), talk["reply"]
    return (text if rng.random() < 0.5 else text[:1].upper() + text[1:]), reply


def nonsense(rng: random.Random) -> tuple[str, str]:
    """Something out of reach, and the polite reply to it."""
    if rng.random() < 0.25:
        return rng.choice(w.english()), FALLBACK
    text = w.fill(rng, rng.choice(w.TABLES["nonsense"]))
    return (text if rng.random() < 0.5 else text[:1].upper() + text[1:]), FALLBACK


def _items(rng: random.Random, low: int, high: int) -> list[str]:
    count = rng.randint(low, high)
    numbers = [str(rng.randint(0, rng.choice((9, 99)))) for _ in range(count)]
    words = [w.any_word(rng) for _ in range(count)]
    return rng.choice((numbers, rng.sample(rng.choice(_LISTS), count), words))


def _ask(rng: random.Random, verbs: str, text: str) -> str:
    verb = rng.choice(verbs.split("|"))
    if rng.random() < 0.4:
        verb = verb[:1].upper() + verb[1:]
    mark = rng.choice((":", ":", "", " this:"))
    please = rng.choice(("", "", "", "please ", "can you "))
    return f"{please}{verb}{mark} {text}"


def _copy(rng: random.Random) -> tuple[str, str]:
    text = rng.choice(
        (" ".join(_items(rng, 1, 8)), rng.choice(w.english()), small_talk(rng)[0], nonsense(rng)[0])
    )
    return _ask(rng, "repeat|copy|say|repeat after me|echo|repeat the words", text), text


def _reverse(rng: random.Random) -> tuple[str, str]:
    separator = rng.choice((" ", ", "))
    items = _items(rng, 2, 7)
    verbs = "reverse|reverse the list|reverse the words|reverse the order of|say backwards"
    return _ask(rng, verbs, separator.join(items)), separator.join(reversed(items))


def _sort(rng: random.Random) -> tuple[str, str]:
    separator = rng.choice((" ", ", "))
    if rng.random() < 0.7:
        items = [str(n) for n in rng.sample(range(rng.choice((10, 100))), rng.randint(2, 6))]
        ordered = sorted(items, key=int)
    else:
        items = rng.sample(rng.choice(_LISTS), rng.randint(2, 5))
        ordered = sorted(items)
    verbs = "sort|sort the list|sort these|order|put in order|sort the numbers|sort the words"
    return _ask(rng, verbs, separator.join(items)), separator.join(ordered)


def _pick(rng: random.Random) -> tuple[str, str]:
    separator = rng.choice((" ", ", "))
    items = _items(rng, 2, 7)
    which, found = rng.choice((("first", items[0]), ("last", items[-1])))
    return f"what is the {which} of: {separator.join(items)}", found


def _arithmetic(rng: random.Random) -> tuple[str, str]:
    top = rng.choice((10, 20, 100, 100, 1000))
    a, b = rng.randint(0, top - 1), rng.randint(0, top - 1)
    sign, said = rng.choice(("+ plus", "+ plus", "- minus", "* times")).split()
    if sign == "-":
        a, b = max(a, b), min(a, b)
    if sign == "*":
        a, b = a % 11, b % 11
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    sum_ = rng.choice((f"{a} {sign} {b}", f"{a}{sign}{b}", f"{a} {said} {b}"))
    forms = "what is {}?|what is {}|{}|{} = ?|{}=|calculate {}|how much is {}?|whats {}|{}?"
    text = rng.choice(forms.split("|")).format(sum_)
    return (text[:1].upper() + text[1:]), f"{a} {sign} {b} = {result}"


def _count(rng: random.Random) -> tuple[str, str]:
    first = rng.choice((1, rng.randint(0, 40)))
    last = first + rng.randint(2, 12)
    text = f"count from {first} to {last}" if first != 1 else f"count to {last}"
    return text, " ".join(str(n) for n in range(first, last + 1))


_SKILLS = (_copy, _reverse, _sort, _pick, _arithmetic, _arithmetic, _arithmetic, _count, _sort)


def skill(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_SKILLS)(rng)

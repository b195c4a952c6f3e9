"""Small talk and small skills for the demo model: (user, assistant) pairs that need no memory."""

import random

from tools.demo_model import words as w

FALLBACK: str = w.TABLES["fallback"]
_SORTED = ("FOODS", "ANIMALS", "COLOURS", "THINGS", "NAMES", "CITIES")


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
    choice = rng.random()
    if choice < 0.3:
        return [str(rng.randint(0, 99)) for _ in range(count)]
    if choice < 0.5:
        return [str(rng.randint(0, 9)) for _ in range(count)]
    if choice < 0.8:
        return rng.sample(w.WORDS[rng.choice((*_SORTED, "PLACES"))], count)
    return [w.any_word(rng) for _ in range(count)]


def _ask(rng: random.Random, verbs: str, text: str) -> str:
    verb = rng.choice(verbs.split("|"))
    if rng.random() < 0.4:
        verb = verb[:1].upper() + verb[1:]
    mark = rng.choice((":", ":", "", " this:"))
    please = rng.choice(("", "", "", "please ", "can you "))
    return f"{please}{verb}{mark} {text}"


def _copy(rng: random.Random) -> tuple[str, str]:
    choice = rng.random()
    if choice < 0.3:
        text = " ".join(w.any_word(rng) for _ in range(rng.randint(1, 8)))
    elif choice < 0.45:
        text = rng.choice(w.english())
    elif choice < 0.65:
        subject = w.fill(rng, "I|you|we|they|{NAMES}")
        verb = w.fill(rng, "love|like|saw|have|want|need|found|made|see")
        text = w.fill(rng, f"{subject} {verb} {{ADJECTIVES}} {{word}}")
    elif choice < 0.75:
        text = rng.choice((small_talk, nonsense))(rng)[0]
    else:
        text = rng.choice((" ", ", ")).join(_items(rng, 1, 8))
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
        items = rng.sample(w.WORDS[rng.choice(_SORTED)], rng.randint(2, 5))
        if rng.random() < 0.5:  # one of each, as in "apple, cherry"
            items = [item[:-1] if item.endswith("s") and len(item) > 4 else item for item in items]
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
    choice = rng.random()
    if choice < 0.55:
        sign, shown, result = rng.choice(("+", "+", "+", "plus")), "+", a + b
    elif choice < 0.85:
        a, b = max(a, b), min(a, b)
        sign, shown, result = rng.choice(("-", "-", "-", "minus")), "-", a - b
    else:
        a, b = a % 11, b % 11
        sign, shown, result = rng.choice(("*", "x", "times")), "*", a * b
    space = rng.choice((" ", " ", "")) if len(sign) == 1 else " "
    sum_ = f"{a}{space}{sign}{space}{b}"
    forms = "what is {}?|what is {}|{}|{} = ?|{}=|calculate {}|how much is {}?|whats {}|{}?"
    text = rng.choice(forms.split("|")).format(sum_)
    return (text[:1].upper() + text[1:]), f"{a} {shown} {b} = {result}"


def _count(rng: random.Random) -> tuple[str, str]:
    first, last = 1, rng.randint(2, 15)
    text = f"count to {last}"
    if rng.random() < 0.4:
        first = rng.randint(0, 40)
        last = first + rng.randint(2, 12)
        text = f"count from {first} to {last}"
    return text, " ".join(str(n) for n in range(first, last + 1))


_SKILLS = (_copy, _reverse, _sort, _pick, _arithmetic, _arithmetic, _arithmetic, _count, _sort)


def skill(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_SKILLS)(rng)

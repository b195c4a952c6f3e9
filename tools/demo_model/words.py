"""Word lists and random words for the demo model's training data."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from functools import cache
from pathlib import Path


def _words(text: str) -> list[str]:
    return text.split()


def _list(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(",")]


NAMES = _words("""
Ada Alan Alice Amir Amy Anna Anton Aria Ben Bella Bob Bruno Carla Carlos Carol Cecil Chloe
Clara Colin Cora Dan Daniel Dave David Diana Dora Edgar Elena Ella Emil Emily Emma Eric Erin
Eva Ethan Fatima Felix Finn Fiona Frank Frida Fred George Gina Grace Greta Hanna Hans Harry
Hugo Ian Ida Igor Ines Iris Isaac Ivan Jack Jacob James Jan Jane Jason Jenny John Jonas Jose
Julia Karen Karl Kate Ken Kevin Kim Lara Laura Lena Leo Lily Linda Lisa Louis Lucas Lucy Luis
Maria Mark Marta Martin Mary Max Maya Mei Mia Mike Mila Mona Nadia Nick Nina Noah Nora Olga
Oliver Omar Oscar Otto Paul Paula Peter Petra Priya Quinn Rachel Raj Ralph Rita Robert Rosa
Ruth Sam Sara Sarah Simon Sofia Sonia Stefan Steve Susan Tara Tessa Theo Thomas Tim Tina Tom
Uma Ursula Vera Victor Wanda Walter Will Xavier Yara Yuki Yusuf Zara Zoe
""")
SURNAMES = _words("""
Adams Baker Brown Carter Clark Cooper Davis Evans Fischer Garcia Hill Hughes Jones Kelly King
Klein Lee Lewis Lopez Lovelace Martin Meyer Miller Moore Murphy Novak Patel Reed Rossi Silva
Singh Smith Stone Taylor Tanaka Turing Turner Walker Weber White Wilson Wood Wright Young
""")
CITIES = _words("""
Athens Austin Bath Berlin Bern Bogota Boston Bremen Cairo Chicago Cork Dallas Delhi Denver
Dublin Geneva Ghent Hamburg Helsinki Kyoto Lagos Leeds Leipzig Lima Lisbon London Lyon Madrid
Malmo Miami Milan Montreal Munich Nairobi Naples Oslo Oxford Paris Porto Prague Quito Riga Rome
Seattle Seoul Sofia Tokyo Toronto Tunis Turin Utrecht Venice Vienna Warsaw York Zurich Sydney
Mumbai Beijing
""")
COLOURS = _words("""
red blue green yellow black white brown pink purple orange grey silver golden violet
""")
ADJECTIVES = [
    *COLOURS,
    *_words("""
small big old new round square heavy light wooden metal plastic broken clean dirty tiny huge
long short soft hard quiet noisy cold warm wet dry left right upper lower first second third
last shiny dusty striped secret empty full
"""),
]
THINGS = _words("""
box key lamp door book safe chest bag bottle cup chair table drawer phone laptop camera clock
map coin ring hat coat shoe umbrella bicycle car boat train truck robot drone guitar piano
violin drum letter parcel folder file ticket card pen pencil notebook suitcase basket bucket
ladder hammer knife spoon fork plate kettle oven fridge mirror carpet pillow blanket candle
vase painting statue garden gate tower bridge house shed barn cabin castle vault locker cabinet
desk printer server router radio television computer tablet watch telescope engine machine
rocket balloon kite ball doll puzzle apple cake stone crystal flag mask sword shield crown
medal trophy jar tent bench fence tree flower
""")
PLACES = _words("""
kitchen garden garage attic cellar bedroom bathroom office hall library museum station market
school hospital hotel harbour park forest church bakery bank theatre drawer box bag car shed
cupboard shelf table desk bed sofa chair door tree bridge carpet window stairs basket
""")
FOODS = _words("""
apples bread cheese chocolate coffee tea pasta pizza rice soup salad bananas cherries grapes
honey noodles olives pancakes pears plums potatoes tomatoes sushi tacos waffles lemons peaches
mangoes cookies cake curry beans nuts carrots spinach yoghurt
""")
JOBS = _words("""
baker teacher doctor nurse pilot painter farmer writer lawyer singer dancer driver cook
gardener plumber carpenter dentist judge sailor tailor chemist librarian mechanic photographer
programmer engineer artist actor architect electrician editor
""")
ANIMALS = _words("""
dog cat horse rabbit hamster parrot bird fish snake turtle goat sheep cow pig duck hen fox owl
bear wolf lion tiger mouse bee frog
""")
KIN = _words("""
mother father sister brother wife husband son daughter boss friend neighbour teacher uncle aunt
cousin partner grandmother grandfather colleague doctor
""")
DAYS = _words("""
Monday Tuesday Wednesday Thursday Friday Saturday Sunday
""")
MONTHS = _words("""
January February March April May June July August September October November December
""")
GROUPS = _words("project team room server group client building station")
EVENTS = _list("""
meeting, train, bus, boat, show, lesson, concert, party, class, flight, exam, interview, lunch,
dinner, game, call, lecture, dentist appointment, appointment, workshop, film, match, tour
""")
THING_ATTRIBUTES = _list("""
code, pin, password, number, label, serial number, secret word, combination, colour, weight,
size, brand, passphrase, key, address, status, version, model, access code, door code, tracking
number, pin code
""")
PERSON_ATTRIBUTES = _list("""
phone number, favourite colour, favourite food, favourite animal, email, favourite number,
favourite city, lucky number, birthday, hobby, nickname, room number, seat, car, password, pin,
code, age, favourite book, favourite song, favourite sport, locker code, address, team,
favorite color, badge number, secret code, access code
""")
MY_ATTRIBUTES = _list("""
phone number, favourite colour, favourite food, favourite animal, email, favourite number,
favourite city, lucky number, birthday, hobby, nickname, room number, seat, car, password, pin,
code, favourite book, favourite song, favourite sport, locker code, address, team, wifi
password, pin code, flight number, bank card number, user name, last name, middle name, door
code, postcode, customer number, order number, school, company, secret, secret code, favorite
color, favorite food, favorite number, favorite animal, street, country, age, booking number,
shopping list, secret word, secret number
""")
LONE_ATTRIBUTES = _list("""
secret word, password, wifi password, magic number, magic word, door code, code word, secret
number, passphrase, project name, answer, key, code, winning number, room number, safe word,
token, launch code, meeting room, name of the project, name of the ship, deadline, name of the
server, budget, access code, pin, secret code, secret key, special number, secret, capital of
France, weather, king, boss, winner, plan, price, colour, best city, number
""")

_ONSETS = _words("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl qu sh st th tr")
_VOWELS = _words("a e i o u a e i o u ai ea oo ou")
_CODAS = ["", "", "", *_words("l m n r s t x nd rk st ck ng")]


def pseudo_word(rng: random.Random) -> str:
    """A made-up, pronounceable word."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
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

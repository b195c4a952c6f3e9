"""Small talk and small skills for the demo model: (user, assistant) pairs that need no memory."""

from __future__ import annotations

import random

from tools.demo_model import words as w

_BAR = "|"

_WHO = (
    "I am the tiny demo model of vllm_metal_lite. I have fewer than three million parameters; "
    "I am here to show that the engine works."
)
_CAN = (
    "I can remember facts that you tell me, repeat, reverse or sort short lists, count, "
    "and add or subtract small numbers."
)
_REAL = "For a real model, run: vllm-metal-lite chat mlx-community/Qwen3-0.6B-4bit"
FALLBACK = f"I am only a tiny demo model and I did not understand that. {_CAN}"

_TALK: tuple[tuple[str, str], ...] = (
    (
        "hello|hi|hey|hello there|hi there|good morning|good evening|good afternoon|hey there|"
        "greetings|hallo|hello!|hi!|hey you|howdy|yo|hello world|hello model|hi bot",
        "Hello! I am a tiny demo model. Tell me something to remember, then ask me about it.",
    ),
    (
        "who are you?|what are you?|tell me about yourself|what is your name?|introduce yourself|"
        "what model are you?|which model are you?|are you a robot?|are you a real model?|"
        "what's your name?|who am i talking to?|are you human?|are you an ai?|are you chatgpt?|"
        "describe yourself|do you have a name?|hi, who are you?|hello, who are you?|"
        "what kind of model are you?|which model is this?|what is this?|who is this?",
        _WHO,
    ),
    (
        "what can you do?|help|help me|what do you know?|how can you help me?|"
        "what are you able to do?|who are you and what can you do?|what are your abilities?|"
        "what can i ask you?|what should i ask?|what are your skills?|show me what you can do|"
        "what do you do?|how do i use you?|can you help me?|what else can you do?|what now?|"
        "give me an example|what are you good at?|what can i do here?|list your skills",
        _CAN,
    ),
    (
        "thanks|thank you|thank you very much|thanks a lot|great, thanks|cool, thanks|thx|"
        "many thanks|thanks!|thank you!|ok thanks|perfect, thank you|nice, thanks",
        "You are welcome!",
    ),
    (
        "bye|goodbye|see you|good night|bye bye|see you later|good bye|ciao|farewell|exit|quit|"
        "i have to go|talk to you later|that is all|bye!|goodbye!",
        "Goodbye!",
    ),
    (
        "how are you?|how are you doing?|how do you do?|how is it going?|what's up?|are you ok?|"
        "how are you today?|how do you feel?|hi, how are you?|hello, how are you?",
        "I am fine, thank you. I am a tiny model, so little can go wrong.",
    ),
    (
        "how big are you?|how many parameters do you have?|how large are you?|what is your size?|"
        "how small are you?|how tiny are you?|how many layers do you have?",
        "I am tiny: fewer than three million parameters and six layers.",
    ),
    (
        "who made you?|who created you?|who built you?|where do you come from?|who trained you?|"
        "how were you made?|how were you trained?|who wrote you?|where are you from?",
        "I come with vllm_metal_lite. I was trained for a few minutes on made-up conversations.",
    ),
    (
        "what is vllm_metal_lite?|what is vllm metal lite?|what is this project?|"
        "what is vllm?|what is this engine?|tell me about vllm_metal_lite|what is mlx?",
        "vllm_metal_lite is a light Apple Silicon backend for vLLM, built on MLX. "
        "I am the demo model inside it.",
    ),
    (
        "how do i run a real model?|how do i use a bigger model?|can i use another model?|"
        "do you know a better model?|you are stupid|you are bad|you are not very smart|"
        "you are dumb|which real model can i use?|how do i chat with a real model?|"
        "how can i try a larger model?|is there a bigger model?|give me a real model|"
        "you are wrong|that is wrong|this is useless|i want a better model|are you smart?",
        f"I am only a demo. {_REAL}",
    ),
    (
        "ok|okay|cool|nice|great|good|wow|yes|sure|fine|i see|well done|good job|perfect|"
        "that is right|correct|right|very good|amazing|interesting|lol|haha|awesome",
        "Good! Tell me something to remember, or ask me something.",
    ),
    ("no|nope|never mind|stop|nothing|forget it|not really", "All right."),
    (
        "can you remember things?|do you have a memory?|how good is your memory?|"
        "can you remember facts?|how long is your memory?|do you remember things?|"
        "will you remember this?|can you remember something for me?",
        "Yes. Tell me facts, and ask for them later; I see about four thousand tokens back.",
    ),
    (
        "what did i tell you?|what do you know about me?|what did i say?|what do you remember?|"
        "list everything|list all facts|tell me everything|what have i told you?|"
        "what facts do you know?|repeat everything|tell me what you know",
        "Please ask me for one thing at a time.",
    ),
    (
        "tell me a joke|joke|make me laugh|do you know a joke?|tell me something funny|"
        "tell me another joke|a joke please|say something funny",
        "Why did the tiny model cross the road? It only remembered that it should.",
    ),
    (
        "how old are you?|when were you born?|what is your age?|when were you made?|your age?",
        "I was trained in a few minutes, so I am still very young.",
    ),
    (
        "tell me something|say something|tell me a fact|surprise me|talk to me|speak|start|test|"
        "testing|this is a test|are you there?|anyone there?|can you hear me?|"
        "do you understand me?",
        "I am here. Tell me something to remember, then ask me about it.",
    ),
    (
        "sorry|i am sorry|excuse me|pardon|oops|my mistake",
        "No problem!",
    ),
)

_NONSENSE = (
    "write a poem|write a story about {x}|what is the meaning of life?|why is the sky blue?|"
    "write python code for {x}|translate {x} to french|what do you think of {x}?|"
    "explain {x} to me|how does {x} work?|what is {x}?|who invented the {x}?|sing a song|"
    "how do i cook {x}?|summarise this text|what time is it?|who won the game?|"
    "can you draw {x}?|how far away is the moon?|how old is the universe?|is {x} good?|"
    "write an essay about {x}|why are {x} so popular?|how do i fix my {x}?|recommend a {x}|"
    "what should i eat?|do you like {x}?|do you love me?|i want {x}|i need a {x}|"
    "buy me a {x}|{x}|{x} {x}|{x} {x} {x}|blah blah|asdf|qwerty|who is the president?|"
    "are {x} real?|tell me about {x}|tell me a story|what is a {x}?|where can i buy {x}?|"
    "how to make {x}|hablas español?|sprichst du deutsch?|parlez-vous français?|привет|😀|"
    "???|...|can you write code?|do you dream?|what happened in 1969?|i feel sad|"
    "i am bored|list the planets|name three {x}s|when did the war end?|define {x}|"
    "how many {x}s are there?|what did you eat today?|i went to {x} yesterday|it is raining|"
    "we had {x} for dinner|my {x} is broken|can i have some {x}?|how many people live here?|"
    "what is the square root of 2?|explain quantum physics|who is {x}?|"
    "the {x} went to the {x}|what is love?|i do not like {x}|how much does {x} weigh?|"
    "open the {x}|turn on the {x}"
).split(_BAR)

_LISTS = [w.FOODS, w.ANIMALS, w.COLOURS, w.NAMES, w.THINGS, w.CITIES, w.PLACES]


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A greeting, thanks, or a question about the model itself."""
    questions, reply = rng.choice(_TALK)
    text = rng.choice(questions.split("|"))
    return (text if rng.random() < 0.5 else text[:1].upper() + text[1:]), reply


def nonsense(rng: random.Random) -> tuple[str, str]:
    """Something out of reach, and the polite reply to it."""
    if rng.random() < 0.25:
        return rng.choice(w.english()), FALLBACK
    text = rng.choice(_NONSENSE)
    while "{x}" in text:
        text = text.replace("{x}", w.any_word(rng), 1)
    return (text if rng.random() < 0.5 else text[:1].upper() + text[1:]), FALLBACK


def _items(rng: random.Random, low: int, high: int) -> list[str]:
    count = rng.randint(low, high)
    choice = rng.random()
    if choice < 0.3:
        return [str(rng.randint(0, 99)) for _ in range(count)]
    if choice < 0.5:
        return [str(rng.randint(0, 9)) for _ in range(count)]
    if choice < 0.8:
        return rng.sample(rng.choice(_LISTS), count)
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
        subject = rng.choice(("I", "you", "we", "they", rng.choice(w.NAMES)))
        verb = rng.choice(("love", "like", "saw", "have", "want", "need", "found", "made", "see"))
        text = f"{subject} {verb} {rng.choice(w.ADJECTIVES)} {w.any_word(rng)}"
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
        known = rng.choice((w.FOODS, w.ANIMALS, w.COLOURS, w.THINGS, w.NAMES, w.CITIES))
        items = rng.sample(known, rng.randint(2, 5))
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
    """A small task and its result."""
    return rng.choice(_SKILLS)(rng)

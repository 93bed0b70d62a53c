"""Questions about a small world of facts, greetings, and talk about the model itself."""

from __future__ import annotations

import random

from bench.train_demo.data import words as w
from bench.train_demo.data.sample import Sample, an, answer, capital, user

Fact = tuple[tuple[str, ...], str, str]  # questions, full answer, what it must contain


def _capital_of(rng: random.Random) -> Fact:
    country = rng.choice(sorted(w.CAPITALS))
    city = w.CAPITALS[country]
    if rng.random() < 0.3:
        asks = (
            f"{city} is the capital of which country?",
            f"Which country has the capital {city}?",
        )
        return asks, f"{city} is the capital of {country}.", country
    asks = (
        f"What is the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.",
        f"Do you know the capital of {country}?",
        f"Capital of {country}?",
    )
    return asks, f"The capital of {country} is {city}.", city


def _continent(rng: random.Random) -> Fact:
    continent = rng.choice(sorted(w.CONTINENTS))
    country = rng.choice(w.CONTINENTS[continent].split())
    asks = (
        f"On which continent is {country}?",
        f"Where is {country}?",
        f"Which continent does {country} belong to?",
    )
    return asks, f"{country} is in {continent}.", continent


_NUMBERS = {0: "no", 2: "two", 4: "four", 6: "six", 8: "eight"}


def _creature(rng: random.Random) -> Fact:
    animal = rng.choice(sorted(w.CREATURES))
    legs, sound, food, home, young = w.CREATURES[animal]
    one = an(animal)
    facts: tuple[Fact, ...] = (
        (
            (f"How many legs does {one} have?", f"How many legs has {one}?"),
            f"{capital(one)} has {_NUMBERS[legs]} legs.",
            _NUMBERS[legs],
        ),
        (
            (f"What sound does {one} make?", f"What does {one} sound like?"),
            f"{capital(one)} {sound}.",
            sound,
        ),
        (
            (f"What does {one} eat?", f"What is the food of {one}?", f"What do you feed {one}?"),
            f"{capital(one)} eats {food}.",
            food,
        ),
        (
            (f"Where does {one} live?", f"What is the home of {one}?"),
            f"{capital(one)} lives in {home}.",
            home,
        ),
        (
            (f"What is a young {animal} called?", f"What do you call a baby {animal}?"),
            f"A young {animal} is called {an(young)}.",
            young,
        ),
    )
    return rng.choice(facts)


def _colour(rng: random.Random) -> Fact:
    thing = rng.choice(sorted(w.COLOUR_OF))
    asks = (f"What colour is {thing}?", f"Which colour does {thing} have?")
    return asks, f"{capital(thing)} is {w.COLOUR_OF[thing]}.", w.COLOUR_OF[thing]


def _opposite(rng: random.Random) -> Fact:
    word, other = rng.choice(sorted(w.OPPOSITES.items()))
    if rng.random() < 0.4 and other != "light":
        word, other = other, word
    asks = (
        f"What is the opposite of {word}?",
        f"Tell me the opposite of {word}.",
        f"Which word means the opposite of {word}?",
    )
    return asks, f"The opposite of {word} is {other}.", other


def _order(rng: random.Random) -> Fact:
    names = w.DAYS if rng.random() < 0.5 else w.MONTHS
    kind = "day" if names is w.DAYS else "month"
    idx, step = rng.randrange(len(names)), rng.choice((1, -1))
    other = names[(idx + step) % len(names)]
    side = "after" if step == 1 else "before"
    asks = (
        f"Which {kind} comes {side} {names[idx]}?",
        f"What {kind} is {side} {names[idx]}?",
        f"Name the {kind} {side} {names[idx]}.",
    )
    return asks, f"{other} comes {side} {names[idx]}.", other


def _job(rng: random.Random) -> Fact:
    job = rng.choice(sorted(w.DUTIES))
    asks = (f"What does {an(job)} do?", f"What is the work of {an(job)}?", f"What is {an(job)}?")
    return asks, f"{capital(an(job))} {w.DUTIES[job]}.", w.DUTIES[job]


_KINDS = (
    _capital_of,
    _capital_of,
    _continent,
    _creature,
    _creature,
    _colour,
    _opposite,
    _order,
    _job,
)
_ENDS = ("", "", "", " Please answer in one sentence.", " Please.")


def question(rng: random.Random) -> Sample:
    """A short question with one right answer."""
    asks, full, expect = rng.choice(_KINDS)(rng)
    ask = rng.choice(asks) + rng.choice(_ENDS)
    plan = rng.choice((f"I know this: {full}", f"This is a simple question. {full}", full))
    return Sample("question", ask, (user(ask), answer(full, plan)), expect=expect)


_GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there")
_REPLIES = (
    "Hello! How can I help you?",
    "Hi! What can I do for you?",
    "Hello! It is nice to meet you. What would you like to know?",
    "Hi there! How can I help you today?",
)
_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("How are you?", "How are you doing?", "How do you do?", "Are you well?"),
        ("I am fine, thank you. How can I help you?", "I am doing well. What can I do for you?"),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "Who am I talking to?",
        ),
        (
            "I am a small demo model that runs in moet. I can tell stories, do sums and use tools.",
            "I am a very small language model, made to show what moet can do.",
        ),
    ),
    (
        ("What can you do?", "How can you help me?", "What are you good at?", "Help"),
        (
            "I can tell short stories, explain simple things, do sums step by step, find "
            "facts in a text, write JSON and call tools.",
        ),
    ),
    (
        ("Are you a human?", "Are you a real person?", "Are you a robot?"),
        (
            "No, I am not a human. I am a small language model.",
            "I am a computer program, a small language model.",
        ),
    ),
    (
        ("Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much."),
        (
            "You are welcome!",
            "You are welcome! Is there anything else I can do?",
            "Glad I could help!",
        ),
    ),
    (
        ("Goodbye!", "Bye!", "See you later.", "Good night!"),
        ("Goodbye! Have a nice day.", "Bye! Take care.", "See you!"),
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
        (
            "Why did the book go to the doctor? It had lost its spine.",
            "What did the big clock say to the small clock? Do not worry, your time will come.",
            "Why is the sea so friendly? It always waves.",
        ),
    ),
)


def talk(rng: random.Random) -> Sample:
    """Greetings, thanks, and questions about the model."""
    name = rng.choice(w.NAMES)
    if rng.random() < 0.35:
        hello, end = rng.choice(_GREETINGS), rng.choice(("!", ".", "", ", how are you?"))
        if rng.random() < 0.4:
            ask = f"{hello}{rng.choice(('!', '.'))} {rng.choice(('My name is', 'I am'))} {name}."
            text = f"Hello {name}! {rng.choice(('How can I help you?', 'Nice to meet you.'))}"
        else:
            ask, text = hello + end, rng.choice(_REPLIES)
        plan = "The user says hello. I will greet back."
    else:
        asks, texts = rng.choice(_TALK)
        ask, text = rng.choice(asks), rng.choice(texts)
        plan = "This is small talk. I will answer in a friendly way."
    return Sample("talk", f"{ask}|{text}", (user(ask), answer(text, plan)))

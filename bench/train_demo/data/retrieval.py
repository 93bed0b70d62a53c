"""Finding and copying: codes hidden in long text, lists repeated, facts taken from a passage."""

from __future__ import annotations

import math
import random

from bench.train_demo.data import words as w
from bench.train_demo.data.sample import Sample, answer, capital, user
from bench.train_demo.data.stories import tale
from moet.server.chat.messages import Message

_ASKS = (
    "What is the code of {}?",
    "Which code does {} have?",
    "Tell me the code of {}.",
    "I need the code of {}.",
)


def _filler(rng: random.Random) -> str:
    """A sentence that says nothing about codes."""
    name, other = rng.sample(w.NAMES, 2)
    place, thing, colour = rng.choice(w.PLACES), rng.choice(w.THINGS), rng.choice(w.COLOURS)
    city, day, goods = rng.choice(w.CITIES), rng.choice(w.DAYS), rng.choice(w.GOODS)
    return rng.choice(
        (
            f"{name} bought {rng.randint(2, 30)} {goods} at the {place}.",
            f"The {rng.choice(w.ANIMALS)} slept under the {colour} {thing}.",
            f"On {day} it was {rng.choice(w.WEATHERS)} in {city}.",
            f"{name} and {other} walked to the {place}.",
            f"{name} works as a {rng.choice(w.JOBS)} in {city}.",
            f"In {rng.choice(w.MONTHS)} they ate {rng.choice(w.FOODS)} and {rng.choice(w.FOODS)}.",
            f"{name} was {rng.choice(w.FEELINGS)} because of the {thing}.",
            f"Nobody had seen the {colour} {thing} since {day}.",
        )
    )


def needle(rng: random.Random, num_words: int, depth: float | None = None) -> Sample:
    """A code to be found in about num_words words of text; depth 0 is the end, 1 the beginning."""
    pairs = [(colour, thing) for colour in w.COLOURS for thing in w.OBJECTS]
    hidden = rng.sample(pairs, min(1 + num_words // 150, 24) if depth is None else 4)
    codes = {pair: str(rng.randint(1000, 9999)) for pair in hidden}
    wanted = hidden[0]
    sentences: list[str] = []
    words = 0
    while words < num_words:
        text = tale(rng, *rng.sample(w.ANIMALS, 2), None) if rng.random() < 0.15 else _filler(rng)
        sentences.append(text)
        words += text.count(" ") + 1
    for pair, code in codes.items():
        share = rng.random()
        if depth is not None and pair == wanted:
            share = 1 - depth
        said = f"The code of the {pair[0]} {pair[1]} is {code}."
        sentences.insert(_place(sentences, share), said)
    key = f"the {wanted[0]} {wanted[1]}"
    ask = rng.choice(_ASKS).format(key)
    text = " ".join(sentences)
    prompt = rng.choice((f"{text}\n\n{ask}", f"{ask}\n\n{text}", f"{text}\n\n{ask}"))
    if depth is not None:
        prompt = f"{text}\n\n{ask}"
    full = f"The code of {key} is {codes[wanted]}."
    plan = f"I look for {key} in the text. {full}"
    return Sample(
        "needle", f"{key}{codes[wanted]}", (user(prompt), answer(full, plan)), expect=codes[wanted]
    )


def shared_needles(rng: random.Random, num_words: int, num_codes: int) -> list[Sample]:
    """Held-out codes at evenly spread depths of one text, each asked for by a sample of its own,
    the one nearest to the end first."""
    sentences: list[str] = []
    words = 0
    while words < num_words:
        sentences.append(_filler(rng))
        words += sentences[-1].count(" ") + 1
    pairs = rng.sample([(colour, thing) for colour in w.COLOURS for thing in w.OBJECTS], num_codes)
    codes = {key: _code(rng, key, held_out=True) for key in (f"the {c} {t}" for c, t in pairs)}
    places = [_place(sentences, 1 - (i + 0.5) / num_codes) for i in range(num_codes)]
    for place, (key, code) in zip(places, codes.items(), strict=True):
        sentences.insert(place, f"The code of {key} is {code}.")
    text = " ".join(sentences)
    found = []
    for key, code in codes.items():
        full = f"The code of {key} is {code}."
        plan = f"I look for {key} in the text. {full}"
        asked = user(f"{text}\n\n{rng.choice(_ASKS).format(key)}")
        found.append(Sample("needle", f"{key}{code}", (asked, answer(full, plan)), expect=code))
    return found


def _place(sentences: list[str], share: float) -> int:
    """Before which sentence that share of the text has passed."""
    left = share * sum(map(len, sentences))
    for idx, sentence in enumerate(sentences):
        if left < len(sentence) / 2:
            return idx
        left -= len(sentence)
    return len(sentences)


def short_needle(rng: random.Random) -> Sample:
    """A needle in up to some 600 words."""
    return needle(rng, int(20 * 30 ** rng.random()))


def long_needle(rng: random.Random) -> Sample:
    """A needle in some 600 to 6,600 words: up to about 8k tokens."""
    return needle(rng, int(600 * 11 ** rng.random()))


def quiz(rng: random.Random, num_words: int, num_codes: int) -> Sample:
    """Many codes in about num_words words besides, then a question about each of them.

    Every answer is wanted, so that one row teaches finding many times over. The codes are those
    that needles have in training.
    """
    sentences: list[str] = []
    words = 0
    while words < num_words:
        sentences.append(_filler(rng))
        words += sentences[-1].count(" ") + 1
    colours, things = list(w.COLOURS), list(w.OBJECTS)
    if rng.random() < 0.6:  # few of each, so that neither word alone tells which code is meant
        few = 2 + math.isqrt(num_codes)
        colours, things = rng.sample(colours, few), rng.sample(things, few)
    pairs = rng.sample([(colour, thing) for colour in colours for thing in things], num_codes)
    codes = {
        key: _code(rng, key, held_out=False) for key in (f"the {c} {thing}" for c, thing in pairs)
    }
    for key, code in codes.items():
        sentences.insert(rng.randrange(len(sentences) + 1), f"The code of {key} is {code}.")
    turns: list[Message] = []
    for key in rng.sample(list(codes), num_codes):
        turns += [
            user(rng.choice(_ASKS).format(key)),
            answer(f"The code of {key} is {codes[key]}."),
        ]
    text = " ".join(sentences)
    turns[0] = user(f"{text}\n\n{turns[0].content}")
    return Sample("quiz", text, tuple(turns), think=False, every_answer=True)


def _code(rng: random.Random, key: str, *, held_out: bool) -> str:
    """A code that makes a needle of the wanted side of the split."""
    while True:
        code = str(rng.randint(1000, 9999))
        if Sample("needle", f"{key}{code}", ()).held_out == held_out:
            return code


def short_quiz(rng: random.Random) -> Sample:
    """Up to some 1,000 tokens, most of them about codes."""
    num_codes = rng.randint(4, 22)
    return quiz(rng, int(rng.choice((0, 0.5, 1)) * (570 - 22 * num_codes)), num_codes)


def long_quiz(rng: random.Random) -> Sample:
    """Some 600 to 5,700 words, then up to 24 questions."""
    return quiz(rng, int(600 * 9.5 ** rng.random()), rng.randint(8, 24))


def copy(rng: random.Random) -> Sample:
    """Words or numbers to be said again."""
    count = rng.randint(2, 16)
    if rng.random() < 0.5:
        listed = [str(rng.randint(0, 999)) for _ in range(count)]
    else:
        lists = (w.THINGS, w.ANIMALS, w.FOODS, w.NAMES, w.COLOURS)
        listed = [rng.choice(rng.choice(lists)) for _ in range(count)]
    items = ", ".join(listed)
    ask = rng.choice((f"Repeat: {items}", f"Say this again: {items}", f"Copy this list: {items}"))
    plan = "I will repeat it word by word."
    return Sample("copy", items, (user(ask), answer(items, plan)), expect=items)


def passage(rng: random.Random) -> Sample:
    """A few people and things, and a question about one of them."""
    people = rng.sample(w.NAMES, rng.randint(2, 5))
    lines, facts = [], []
    for name in people:
        kind = rng.randrange(4)
        thing, place = rng.choice(w.THINGS), rng.choice(w.PLACES)
        colour, city, job, age = (
            rng.choice(w.COLOURS),
            rng.choice(w.CITIES),
            rng.choice(w.JOBS),
            rng.randint(5, 90),
        )
        lines.append(
            (
                f"{name} is {age} years old.",
                f"{name} lives in {city}.",
                f"{name} has a {colour} {thing}.",
                f"{name} works as a {job} near the {place}.",
            )[kind]
        )
        facts.append(
            (
                (f"How old is {name}?", f"{name} is {age} years old.", str(age)),
                (f"Where does {name} live?", f"{name} lives in {city}.", city),
                (f"What does {name} have?", f"{name} has a {colour} {thing}.", f"{colour} {thing}"),
                (f"What is the job of {name}?", f"{name} works as a {job}.", job),
            )[kind]
        )
    ask, full, expect = rng.choice(facts)
    prompt = rng.choice((" ".join(lines) + " " + ask, " ".join(lines) + "\n\n" + ask))
    plan = f"The text says: {full}"
    return Sample("passage", prompt, (user(prompt), answer(full, plan)), expect=expect)


def transform(rng: random.Random) -> Sample:
    """Small works on a list: sort, count, first, last, longest."""
    items = rng.sample(rng.choice((w.THINGS, w.ANIMALS, w.FOODS, list(w.NAMES))), rng.randint(3, 7))
    listed = ", ".join(items)
    ask, full = rng.choice(
        (
            ("What is the first word", f"The first word is {items[0]}."),
            ("What is the last word", f"The last word is {items[-1]}."),
            ("How many words are there", f"There are {len(items)} words."),
            ("Which word comes after " + items[0], f"After {items[0]} comes {items[1]}."),
        )
    )
    text = (
        f"{capital(ask)}? {listed}" if rng.random() < 0.5 else f"Here is a list: {listed}. {ask}?"
    )
    expect = full.rsplit(" ", 2)[-2] if "words" in full else full.rsplit(" ", 1)[-1].rstrip(".")
    return Sample(
        "list", text, (user(text), answer(full, f"The list is {listed}. {full}")), expect=expect
    )

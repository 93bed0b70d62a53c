"""JSON answers to a schema: facts of a sentence as an object, with and without a stated schema."""

from __future__ import annotations

import json
import random
from typing import Any

from bench.train_demo.data import words as w
from bench.train_demo.data.sample import Sample, answer, user

_TYPES = {
    "name": "string",
    "age": "integer",
    "city": "string",
    "job": "string",
    "married": "boolean",
    "colour": "string",
    "thing": "string",
    "price": "number",
    "count": "integer",
    "day": "string",
}


def _person(rng: random.Random) -> tuple[str, dict[str, Any]]:
    record = {
        "name": rng.choice(w.NAMES),
        "age": rng.randint(5, 95),
        "city": rng.choice(w.CITIES),
        "job": rng.choice(w.JOBS),
        "married": rng.random() < 0.5,
    }
    state = "married" if record["married"] else "not married"
    text = rng.choice(
        (
            "{name} is {age} years old, lives in {city}, works as a {job} and is {state}.",
            "{name}, a {job} from {city}, is {age} and {state}.",
            "In {city} lives {name}. {name} is {age}, {state}, and works as a {job}.",
        )
    )
    return text.format(**record, state=state), record


def _ware(rng: random.Random) -> tuple[str, dict[str, Any]]:
    record = {
        "thing": rng.choice(w.THINGS),
        "colour": rng.choice(w.COLOURS),
        "price": rng.randint(1, 400) / 4,
        "count": rng.randint(1, 99),
        "day": rng.choice(w.DAYS),
    }
    text = rng.choice(
        (
            "We sell {count} pieces of the {colour} {thing} for {price} each on {day}.",
            "On {day} there were {count} of the {colour} {thing}; the price was {price}.",
            "The {colour} {thing} costs {price}. {count} are left for {day}.",
        )
    )
    return text.format(**record), record


def record(rng: random.Random) -> Sample:
    """A sentence to be turned into an object with some of its facts."""
    text, full = (_person if rng.random() < 0.5 else _ware)(rng)
    keys = rng.sample(list(full), rng.randint(2, len(full)))
    schema = {
        "type": "object",
        "properties": {key: {"type": _TYPES[key]} for key in keys},
        "required": keys,
    }
    stated = rng.random() < 0.6
    wanted = json.dumps({key: full[key] for key in keys})
    if stated:
        ask = rng.choice((text, f"Give me this as JSON: {text}", f"Answer in JSON. {text}"))
    else:
        ask = rng.choice(
            (
                f"Give me the {', '.join(keys)} as JSON: {text}",
                f"{text}\n\nWrite a JSON object with the keys {', '.join(keys)}.",
                f"Extract {', '.join(keys)} as JSON. {text}",
            )
        )
    plan = f"The answer is a JSON object with {', '.join(keys)}."
    return Sample(
        "json",
        f"{text}{keys}",
        (user(ask), answer(wanted, plan)),
        schema=schema if stated else None,
        expect=wanted,
    )

"""Requests that need a tool, with the call, its result and the follow-up. Tool names and parameters
vary, so that a model has to read the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.train_demo.data import words as w
from bench.train_demo.data.facts import question, talk
from bench.train_demo.data.sample import Sample, answer, calls, user
from moet.server.chat.messages import Message, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class Job:
    """One wish, the call that serves it, and what to say once the result is there."""

    ask: str
    tool: Tool
    arguments: dict[str, Any]
    result: str
    reply: str


def _tool(rng: random.Random, name: str, description: str, **parameters: tuple[str, str]) -> Tool:
    """parameters: name -> (JSON type, description); all are required. Details of schemas vary."""
    described = rng.random() < 0.8
    properties = {
        key: {"type": kind, "description": text} if described else {"type": kind}
        for key, (kind, text) in parameters.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.9:
        schema["required"] = list(parameters)
    if rng.random() < 0.15:
        schema["additionalProperties"] = False
    shown = rng.choice((description, description, f"{description}.", f"{description} for the user"))
    return Tool(name, shown, schema)


def _place(rng: random.Random) -> str:
    """A city, at times a made-up one, so that names are copied and not recalled."""
    if rng.random() < 0.7:
        return rng.choice(w.CITIES)
    heads, tails = (
        ("Nor", "Bel", "Kar", "Lun", "Mar", "Tor", "Val", "Wes"),
        ("burg", "ton", "dale", "ford", "heim", "mouth"),
    )
    return rng.choice(heads) + rng.choice(("", "en", "a", "o")) + rng.choice(tails)


def _weather(rng: random.Random) -> Job:
    city, sky, degrees = _place(rng), rng.choice(w.WEATHERS), rng.randint(-9, 35)
    key = rng.choice(("city", "city", "location", "place"))
    name = rng.choice(("get_weather", "get_weather", "weather", "get_current_weather"))
    tool = _tool(
        rng, name, "Get the current weather of a city", **{key: ("string", "Name of the city")}
    )
    ask = rng.choice(
        (
            f"What is the weather in {city}?",
            f"How is the weather in {city} today?",
            f"Is it warm in {city}?",
            f"Tell me the weather in {city}.",
            f"What's the weather like in {city}?",
            f"I am going to {city}. How is the weather there?",
        )
    )
    result = json.dumps({"temperature": degrees, "sky": sky})
    if rng.random() < 0.4:
        result = f"{degrees} degrees, {sky}"
    reply = rng.choice(
        (
            f"It is {sky} in {city}, with {degrees} degrees.",
            f"The weather in {city} is {sky}, and it has {degrees} degrees.",
            f"In {city} it is {sky} and {degrees} degrees.",
        )
    )
    return Job(ask, tool, {key: city}, result, reply)


def _calculator(rng: random.Random) -> Job:
    op = rng.choice("+-*")
    a, b = rng.randint(100, 99999), rng.randint(100, 9999)
    a, b = (max(a, b), min(a, b))
    key = rng.choice(("expression", "expression", "formula"))
    name = rng.choice(("calculator", "calculator", "calculate", "compute"))
    tool = _tool(
        rng, name, "Evaluate an arithmetic expression", **{key: ("string", "The expression")}
    )
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    ask = rng.choice(
        (
            f"What is {a} {op} {b}?",
            f"Calculate {a} {op} {b}.",
            f"Please compute {a} {op} {b} for me.",
            f"Use the {name} to find {a} {op} {b}.",
        )
    )
    reply = f"{a} {op} {b} = {value}."
    result = json.dumps({"result": value}) if rng.random() < 0.5 else str(value)
    return Job(ask, tool, {key: f"{a} {op} {b}"}, result, reply)


_STEMS = [
    "notes",
    "list",
    "report",
    "todo",
    "plan",
    "letter",
    "diary",
    "recipe",
    "config",
    "readme",
    "draft",
    "log",
    "names",
    "prices",
    "menu",
    "poem",
    "story",
    "budget",
]


def _path(rng: random.Random) -> str:
    stem = rng.choice(_STEMS) + rng.choice(
        ("", "", str(rng.randint(1, 99)), f"_{rng.choice(w.MONTHS).lower()}")
    )
    folder = rng.choice(
        ("", "", "docs/", "data/", "/tmp/", "home/", f"{rng.choice(w.NAMES).lower()}/")
    )
    return folder + stem + rng.choice((".txt", ".txt", ".md", ".csv", ".json", ".py"))


def _sentence(rng: random.Random) -> str:
    name, goods, place = rng.choice(w.NAMES), rng.choice(w.GOODS), rng.choice(w.PLACES)
    return rng.choice(
        (
            f"{name} needs {rng.randint(2, 99)} {goods}.",
            f"Meet {name} at the {place} on {rng.choice(w.DAYS)}.",
            f"Buy {rng.choice(w.FOODS)} and {rng.choice(w.FOODS)}.",
            f"The {rng.choice(w.COLOURS)} {rng.choice(w.THINGS)} is in the {place}.",
            f"Call {name} at {rng.randint(1, 12)} o'clock.",
            f"hello {name.lower()}",
        )
    )


def _read(rng: random.Random) -> Job:
    path, text = _path(rng), _sentence(rng)
    key = rng.choice(("path", "path", "file", "filename"))
    name = rng.choice(("read_file", "read_file", "open_file", "cat"))
    tool = _tool(rng, name, "Read a text file", **{key: ("string", "Path of the file")})
    ask = rng.choice(
        (
            f"What is in the file {path}?",
            f"Read {path}.",
            f"Please read the file {path} and tell me what it says.",
            f"Show me {path}.",
            f"Can you open {path} for me?",
        )
    )
    return Job(
        ask,
        tool,
        {key: path},
        text,
        rng.choice((f"The file {path} says: {text}", f"{path} contains: {text}")),
    )


def _write(rng: random.Random) -> Job:
    path, text = _path(rng), _sentence(rng)
    where, what = rng.choice(
        (("path", "content"), ("path", "content"), ("file", "text"), ("filename", "data"))
    )
    name = rng.choice(("write_file", "write_file", "save_file"))
    described = {where: ("string", "Path of the file"), what: ("string", "What to write")}
    tool = _tool(rng, name, "Write text to a file", **described)
    ask = rng.choice(
        (
            f'Write "{text}" to {path}.',
            f"Please save this in {path}: {text}",
            f'Create the file {path} with the text "{text}".',
            f"Store the following in {path}: {text}",
        )
    )
    result = rng.choice(("ok", "done", json.dumps({"ok": True}), f"wrote {len(text)} bytes"))
    reply = rng.choice(
        (f"I have written it to {path}.", f"Done. The text is in {path}.", f"{path} is saved.")
    )
    return Job(ask, tool, {where: path, what: text}, result, reply)


def _timer(rng: random.Random) -> Job:
    minutes, label = (
        rng.randint(1, 90),
        rng.choice(("tea", "pasta", "eggs", "bread", "break", "nap")),
    )
    tool = _tool(
        rng,
        rng.choice(("set_timer", "start_timer")),
        "Start a timer",
        minutes=("integer", "How long"),
        label=("string", "What it is for"),
    )
    ask = rng.choice(
        (
            f"Set a timer of {minutes} minutes for the {label}.",
            f"Start a {label} timer, {minutes} minutes.",
        )
    )
    return Job(
        ask,
        tool,
        {"minutes": minutes, "label": label},
        "started",
        f"The {label} timer runs for {minutes} minutes.",
    )


def _stock(rng: random.Random) -> Job:
    item, left = rng.choice(w.GOODS), rng.randint(0, 500)
    key = rng.choice(("item", "product"))
    tool = _tool(
        rng,
        rng.choice(("stock", "get_stock", "count_items")),
        "Units left of an item",
        **{key: ("string", "The item")},
    )
    ask = rng.choice(
        (
            f"How many {item} are left in stock?",
            f"How many {item} do we have?",
            f"Check the stock of {item}.",
        )
    )
    return Job(ask, tool, {key: item}, json.dumps({"left": left}), f"There are {left} {item} left.")


def _lamp(rng: random.Random) -> Job:
    room, on = (
        rng.choice(("kitchen", "bedroom", "hall", "garden", "office", "bathroom")),
        rng.random() < 0.5,
    )
    tool = _tool(
        rng,
        rng.choice(("set_light", "switch_light")),
        "Switch a light on or off",
        room=("string", "Which room"),
        on=("boolean", "Whether it shall be on"),
    )
    word = "on" if on else "off"
    ask = rng.choice(
        (f"Turn {word} the light in the {room}.", f"Switch the {room} light {word}, please.")
    )
    return Job(ask, tool, {"room": room, "on": on}, "ok", f"The light in the {room} is {word} now.")


JOBS: dict[str, Callable[[random.Random], Job]] = {
    "weather": _weather,
    "calculator": _calculator,
    "read": _read,
    "write": _write,
    "timer": _timer,
    "stock": _stock,
    "light": _lamp,
}
_WEIGHTS = (5, 4, 4, 4, 1, 2, 1)


def _others(rng: random.Random, kind: str) -> list[Tool]:
    """Tools that are declared beside the wanted one."""
    rest = [name for name in JOBS if name != kind]
    return [JOBS[name](rng).tool for name in rng.sample(rest, rng.choice((0, 1, 1, 2, 3)))]


def _mixed(rng: random.Random, tool: Tool, kind: str) -> tuple[Tool, ...]:
    tools = [tool, *_others(rng, kind)]
    rng.shuffle(tools)
    return tuple(tools)


def _call(job: Job, rng: random.Random) -> ToolCall:
    call_id = f"call_{rng.randrange(16**8):08x}"
    return ToolCall(call_id, job.tool.name, json.dumps(job.arguments, ensure_ascii=False))


def _plan(job: Job) -> str:
    shown = " and ".join(f"{key} {value}" for key, value in job.arguments.items())
    return f"I need the tool {job.tool.name} with {shown}."


def call(rng: random.Random) -> Sample:
    """A wish and the right call. The call is the wanted answer."""
    kind = rng.choices(list(JOBS), _WEIGHTS)[0]
    job = JOBS[kind](rng)
    made = _call(job, rng)
    messages = (user(job.ask), calls(_plan(job), made))
    key = f"{made.name}{made.arguments}"
    return Sample("tool_call", key, messages, _mixed(rng, job.tool, kind), expect=made.arguments)


def pair(rng: random.Random) -> Sample:
    """The weather of two cities: two calls at once."""
    job, other = _weather(rng), _place(rng)
    key, city = next(iter(job.arguments.items()))
    second = Job(job.ask, job.tool, {key: other}, "", "")
    made = (_call(job, rng), _call(second, rng))
    ask = rng.choice(
        (
            f"What is the weather in {city} and in {other}?",
            f"Compare the weather of {city} and {other}.",
            f"How is the weather in {city} and {other}?",
        )
    )
    plan = f"I need the tool {job.tool.name} for {city} and for {other}."
    arguments = made[0].arguments + made[1].arguments
    messages = (user(ask), calls(plan, *made))
    tools = _mixed(rng, job.tool, "weather")
    return Sample("tool_pair", arguments, messages, tools, expect=arguments)


def result(rng: random.Random) -> Sample:
    """The call has been made and answered: say what it means."""
    kind = rng.choices(list(JOBS), _WEIGHTS)[0]
    job = JOBS[kind](rng)
    made = _call(job, rng)
    back = Message("tool", job.result, tool_call_id=made.id)
    final = answer(job.reply, f"The tool answered {job.result}. I can tell the user now.")
    messages = (user(job.ask), calls(_plan(job), made), back, final)
    key = f"{made.name}{made.arguments}{job.result}"
    return Sample("tool_result", key, messages, _mixed(rng, job.tool, kind), expect=job.reply)


def follow_up(rng: random.Random) -> Sample:
    """After one finished call the user asks for another one, or for something without tools."""
    kind = rng.choices(list(JOBS), _WEIGHTS)[0]
    job = JOBS[kind](rng)
    made = _call(job, rng)
    back = Message("tool", job.result, tool_call_id=made.id)
    before = (user(job.ask), calls(_plan(job), made), back, answer(job.reply, "I can answer now."))
    if rng.random() < 0.7:
        again, tool = JOBS[kind](rng), job.tool
        renamed = dict(zip(job.arguments, again.arguments.values(), strict=True))
        second = Job(again.ask.replace(again.tool.name, tool.name), tool, renamed, "", "")
        new = _call(second, rng)
        messages = (*before, user(second.ask), calls(_plan(second), new))
        key = f"{new.name}{new.arguments}"
        return Sample("tool_call", key, messages, _mixed(rng, tool, kind), expect=new.arguments)
    plain = talk(rng)
    messages = (*before, *plain.messages)
    return Sample("tool_talk", plain.key, messages, _mixed(rng, job.tool, kind))


_VERBS = ("get", "do", "fetch", "run", "find", "make", "use", "call", "start", "ask", "my", "new")
_NOUNS = {
    "weather": ("weather", "forecast", "sky", "climate", "weather_info"),
    "calculator": ("calculator", "sum", "math", "compute", "formula"),
    "read": ("file", "text", "cat", "document", "page"),
    "write": ("save", "write", "store", "note", "put"),
    "timer": ("timer", "alarm", "clock", "countdown"),
    "stock": ("stock", "count", "items", "store_items"),
    "light": ("light", "lamp", "switch", "bulb"),
}
_KEYS = (
    *("city", "place", "location", "town", "where", "path", "file", "filename", "text", "content"),
    *(
        "data",
        "what",
        "item",
        "product",
        "expression",
        "formula",
        "value",
        "input",
        "query",
        "name",
    ),
    *("target", "label", "minutes", "number", "room", "state", "on", "key", "word", "arg", "it"),
)


_SYLLABLES = ("ba", "ko", "ri", "zu", "mel", "tan", "vo", "shi", "dra", "pel", "nu", "gor", "qua")


def _made_up(rng: random.Random) -> str:
    """A name that no other conversation has taught."""
    return "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3)))


def _renamed(rng: random.Random, job: Job, kind: str) -> Job:
    """The job with a tool whose names say little, so that they have to be read."""
    name = rng.choice((f"{rng.choice(_VERBS)}_", "")) + rng.choice(_NOUNS[kind])
    name += rng.choice(("", "", "_now", f"_{rng.randint(1, 9)}"))
    if rng.random() < 0.2:
        name = _made_up(rng)
    keys = rng.sample(_KEYS, len(job.arguments))
    if rng.random() < 0.2:
        keys = [f"{_made_up(rng)}{idx or ''}" for idx in range(len(keys))]
    new = dict(zip(job.arguments, keys, strict=True))
    schema = dict(job.tool.parameters or {})
    schema["properties"] = {new[key]: part for key, part in schema["properties"].items()}
    if "required" in schema:
        schema["required"] = [new[key] for key in schema["required"]]
    arguments = {new[key]: value for key, value in job.arguments.items()}
    ask = job.ask.replace(job.tool.name, name)
    return Job(ask, Tool(name, job.tool.description, schema), arguments, job.result, job.reply)


def drill(rng: random.Random) -> Sample:
    """Several tools with odd names, each used once or twice, one wish after the other."""
    kinds = rng.sample(list(JOBS), rng.randint(2, 5))
    jobs = [_renamed(rng, JOBS[kind](rng), kind) for kind in kinds]
    while len({job.tool.name for job in jobs}) < len(jobs):
        jobs = [_renamed(rng, JOBS[kind](rng), kind) for kind in kinds]
    tools = tuple(job.tool for job in jobs)
    rng.shuffle(jobs)
    think = rng.random() < 0.4
    messages: list[Message] = []
    for job in jobs:
        made = _call(job, rng)
        messages += [user(job.ask), calls(_plan(job), made)]
        told = answer(job.reply, "I can answer now.")
        messages += [Message("tool", job.result, tool_call_id=made.id), told]
    return Sample("drill", jobs[0].ask, tuple(messages), tools, think=think, every_answer=True)


def unneeded(rng: random.Random) -> Sample:
    """Tools are declared, but the question needs none."""
    kind = rng.choice(list(JOBS))
    plain = question(rng) if rng.random() < 0.6 else talk(rng)
    tools = _mixed(rng, JOBS[kind](rng).tool, kind)
    last = plain.messages[-1]
    final = answer(last.content, "I need no tool for this. " + last.reasoning)
    return Sample("no_tool", plain.key, (*plain.messages[:-1], final), tools, expect=plain.expect)

"""Arithmetic with a visible chain of thought: digit by digit, as one does on paper."""

from __future__ import annotations

import random

from bench.train_demo.data import words as w
from bench.train_demo.data.sample import Sample, answer, user


def add_steps(a: int, b: int) -> str:
    """Column addition from the right, then the result."""
    lines, carry, place = [], 0, 0
    x, y = str(a)[::-1], str(b)[::-1]
    while place < max(len(x), len(y)):
        p = int(x[place]) if place < len(x) else 0
        q = int(y[place]) if place < len(y) else 0
        total = p + q + carry
        terms = f"{p} + {q}" + (" + 1" if carry else "")
        lines.append(f"{terms} = {total}, write {total % 10}" + (", carry 1" if total > 9 else ""))
        carry, place = total // 10, place + 1
    if carry:
        lines.append("write 1")
    return f"{a} + {b}: " + ". ".join(lines) + f". So {a} + {b} = {a + b}."


def subtract_steps(a: int, b: int) -> str:
    """Column subtraction from the right, a >= b, then the result."""
    lines, borrow = [], 0
    x, y = str(a)[::-1], str(b)[::-1].ljust(len(str(a)), "0")
    for p, q in zip(map(int, x), map(int, y), strict=True):
        take = q + borrow
        terms = f"{p} - {q}" + (" - 1" if borrow else "")
        if p < take:
            lines.append(f"{terms}: borrow 10, {p + 10} - {take} = {p + 10 - take}")
            borrow = 1
        else:
            lines.append(f"{terms} = {p - take}")
            borrow = 0
    return f"{a} - {b}: " + ". ".join(lines) + f". So {a} - {b} = {a - b}."


def multiply_steps(a: int, b: int) -> str:
    """One partial product per digit of b, added up, then the result."""
    parts, lines = [], []
    for place, digit in enumerate(reversed(str(b))):
        part = a * int(digit)
        parts.append(part * 10**place)
        zeros = f", with {place} zeros {part * 10**place}" if place and part else ""
        split = _by_digits(a, int(digit)) if a > 9 and int(digit) > 1 else f"{a} * {digit} = {part}"
        lines.append(split + zeros)
    text = f"{a} * {b}: " + ". ".join(lines) + "."
    if len(parts) > 1 and 0 not in parts:
        text += " " + add_steps(parts[0], parts[1])
    return text + f" So {a} * {b} = {a * b}."


def _by_digits(a: int, digit: int) -> str:
    """a * digit from the products of a's digits, highest first."""
    pieces, total = [], 0
    for place, char in enumerate(str(a)):
        value = int(char) * 10 ** (len(str(a)) - 1 - place)
        if value == 0:
            continue
        total += value * digit
        pieces.append(f"{value} * {digit} = {value * digit}")
        if len(pieces) > 1:
            pieces.append(f"together {total}")
    return ", ".join(pieces)


def divide_steps(a: int, b: int) -> str:
    return f"{a} / {b}: I look for the number that gives {a} when multiplied by {b}. " + (
        f"{b} * {a // b} = {a}. So {a} / {b} = {a // b}."
    )


def _pair(rng: random.Random, op: str) -> tuple[int, int]:
    if op == "*":
        return (rng.randint(2, 99), rng.randint(2, 9)) if rng.random() < 0.7 else _two_by_two(rng)
    if op == "/":
        b = rng.randint(2, 12)
        return b * rng.randint(2, 20), b
    digits = rng.choice((1, 2, 2, 3, 3))
    top = 10**digits - 1
    a, b = rng.randint(1, top), rng.randint(1, 10 ** rng.randint(1, digits) - 1)
    if op == "-":
        return max(a, b), min(a, b)
    return (a, b) if rng.random() < 0.5 else (b, a)


def _two_by_two(rng: random.Random) -> tuple[int, int]:
    return rng.randint(11, 99), rng.randint(11, 99)


_STEPS = {"+": add_steps, "-": subtract_steps, "*": multiply_steps, "/": divide_steps}
_RESULT = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}
_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_ASKS = (
    "What is {a} {op} {b}?",
    "{a} {op} {b}",
    "{a} {op} {b} = ?",
    "{a}{op}{b}?",
    "Calculate {a} {op} {b}.",
    "What is {a} {word} {b}?",
    "How much is {a} {word} {b}?",
    "Please compute {a} {op} {b}.",
    "Can you tell me what {a} {word} {b} is?",
)


def bare(rng: random.Random) -> Sample:
    """A sum as a formula."""
    op = rng.choice("++--**/")
    a, b = _pair(rng, op)
    shown = rng.choice("*x") if op == "*" else op
    ask = rng.choice(_ASKS).format(a=a, b=b, op=shown, word=_WORDS[op])
    result = _RESULT[op](a, b)
    text = f"{a} {op} {b} = {result}."
    steps = _STEPS[op](a, b)
    small = a < 20 and b < 20
    # Without thinking, larger sums are worked out in the open.
    message = answer(text if small else f"{steps}", steps)
    thinks = answer(text, steps)
    think = rng.random() < 0.7
    final = thinks if think else message
    expect = f"= {result}."
    return Sample("sum", f"{a}{op}{b}", (user(ask), final), expect=expect, think=think)


_PROBLEMS = {
    "+": (
        "{n} has {a} {goods}. {m} gives {n} {b} more. How many {goods} does {n} have now?",
        "There are {a} {goods} in one box and {b} in another. How many {goods} are there together?",
        "{n} found {a} {goods} in the morning and {b} in the evening. How many is that?",
    ),
    "-": (
        "{n} has {a} {goods} and gives {b} to {m}. How many {goods} are left?",
        "There were {a} {goods} on the table. {n} took {b}. How many are left?",
        "A shop had {a} {goods} and sold {b} of them. How many {goods} does it still have?",
    ),
    "*": (
        "{n} buys {b} bags with {a} {goods} in each. How many {goods} does {n} have?",
        "There are {b} boxes, and each holds {a} {goods}. How many {goods} are there?",
    ),
    "/": (
        "{n} shares {a} {goods} equally among {b} friends. How many does each friend get?",
        "{a} {goods} are packed into {b} equal boxes. How many are in each box?",
    ),
}
_KEY_WORDS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}


def problem(rng: random.Random) -> Sample:
    """A sum told as a little story."""
    op = rng.choice("++--*/")
    a, b = _pair(rng, op)
    if a == 1 or b == 1 or max(a, b) > 999:
        a, b = a + 2, b + (2 if op == "+" else 0)
        if op == "/":
            a = b * max(2, a // b)
        if op == "-" and b < 2:
            b = 2 if a > 2 else 1
    n, m = rng.sample(w.NAMES, 2)
    goods = rng.choice(w.GOODS)
    ask = rng.choice(_PROBLEMS[op]).format(n=n, m=m, a=a, b=b, goods=goods)
    if op == "-":
        a, b = max(a, b), min(a, b)
    result = _RESULT[op](a, b)
    steps = f"I must {_KEY_WORDS[op]}. " + _STEPS[op](a, b)
    text = f"The answer is {result} {goods}."
    think = rng.random() < 0.7
    final = answer(text if think else f"{steps} {text}", steps)
    expect = f"is {result} {goods}"
    return Sample("problem", f"{op}{a},{b}", (user(ask), final), expect=expect, think=think)


def compare(rng: random.Random) -> Sample:
    """Which of two numbers is larger, or a number's neighbour."""
    a, b = rng.sample(range(1, 1000 if rng.random() < 0.5 else 100), 2)
    if rng.random() < 0.6:
        larger = rng.random() < 0.5
        best = max(a, b) if larger else min(a, b)
        word = "larger" if larger else "smaller"
        ask = f"Which number is {word}, {a} or {b}?"
        text, plan = f"{best} is {word}.", f"I compare {a} and {b}. {best} is {word}."
    else:
        step = rng.choice((1, -1))
        best = a + step
        ask = f"Which number comes {'after' if step == 1 else 'before'} {a}?"
        text, plan = f"It is {best}.", f"{a} {'+' if step == 1 else '-'} 1 = {best}."
    return Sample("compare", f"{ask}", (user(ask), answer(text, plan)), expect=f"{best}")

"""Short stories and explanations from a grammar: some thousand sentence shapes, no two stories
alike. Knows nothing of chat formats."""

from __future__ import annotations

import random

from bench.train_demo.data import words as w
from bench.train_demo.data.sample import Sample, an, answer, capital, user

_OPENINGS = (
    "Once upon a time, {a_who} lived in {place}.",
    "There was once {a_who} who lived near {place}.",
    "In {place} there lived {a_who}.",
    "Long ago, {a_who} lived alone in {place}.",
    "One {season} morning, {who} woke up in {place}.",
    "{Who} lived in {place} with {his} family.",
    "{Who} had always lived in {place}.",
    "It was a quiet {season} day in {place}, and {who} had nothing to do.",
)
_TRAITS = (
    "{He} was very {feeling} and loved {food}.",
    "Everyone said that {he} was the most {feeling} {kind} in the {spot}.",
    "{He} was small, but {he} was never afraid.",
    "{He} liked to sing, and {he} liked {food} even more.",
    "{His} best friend was {friend}, who lived next door.",
    "Every day {he} walked to {place2} and back.",
    "{He} had {a_thing} that {he} had got from {his} grandmother.",
    "{He} was often {feeling}, because {his} friends lived far away.",
)
_WISHES = (
    "More than anything, {he} wanted {a_thing}.",
    "One day {he} found {a_thing} under a tree.",
    "One morning {his} {thing} was gone.",
    "One evening {he} heard a strange sound from {place2}.",
    'That day {friend} came running. "Come quickly!" cried {friend}. "The {thing} is lost!"',
    "{He} wished to see {place2}, where {he} had never been.",
    "Then winter came, and there was no more {food_one} to eat.",
    "{He} decided to bake a cake for {friend}.",
    "{He} heard that somebody in {place2} needed help.",
    "One night a storm broke the roof of {his} house.",
)
_TROUBLES = (
    "But the way was long, and it began to rain.",
    "But the bridge over the river was broken.",
    "At first {he} did not know what to do.",
    "{He} looked behind the {spot2}, and {he} looked under the stones, but {he} found nothing.",
    "Soon it grew dark, and {he} was {bad}.",
    "On the way {he} met {friend}, who looked {bad}.",
    "But {he} was too small to carry it alone.",
    "{He} tried once, and {he} tried again, but it did not work.",
    "A big wind came and blew {his} {thing2} away.",
    '"It is too far for you," said an old {animal2}.',
)
_TURNS = (
    '"May I help you?" asked {friend}. "Yes, please," said {who}.',
    "Then {he} had an idea. {He} took {a_thing2} and made a small boat out of it.",
    'So {he} sat down and thought. "I will ask {friend}," {he} said.',
    '"Do not be {bad}," said {friend}. "Two are stronger than one."',
    "{Friend} brought {a_thing2}, and together they started to work.",
    "{He} shared {his} {food_one} with {friend}, and then both of them felt better.",
    "{He} took a deep breath and went on, step by step.",
    "An old {job} saw them and gave them {a_thing2}.",
    '"Follow me," whispered {friend}. "I know the way."',
    "They waited until the sun came out, and then they tried once more.",
)
_ENDINGS = (
    "In the end {he} had what {he} wanted, and {he} was {good}.",
    "From that day on, {who} and {friend} were best friends.",
    "At last they came home, and they ate {food} until it was late.",
    "{He} thanked {friend} and went home {good}.",
    "And when {he} fell asleep that night, {he} was {good}.",
    "Everybody in {place} heard of it and was proud of {him}.",
    "{He} never forgot that day.",
    "{Friend} laughed, and {who} laughed too, and they danced in the {spot}.",
)
_MORALS = (
    "A good friend is worth more than gold.",
    "It is always good to ask for help.",
    "Those who share are never alone.",
    "Small steps also lead to the goal.",
    "Who is kind will find kindness.",
    "It pays to be patient.",
)
_SPOTS = {
    "forest": "trees",
    "garden": "flowers",
    "beach": "rocks",
    "farm": "barn",
    "market": "tables",
    "kitchen": "door",
    "library": "shelves",
}
_SEASONS = ("spring", "summer", "autumn", "winter")
_GOOD = ("happy", "proud", "very glad", "tired but happy", "calm", "full of joy")
_BAD = ("sad", "afraid", "cold", "worried", "tired", "hungry")
_ASK_ONE = (
    "Tell me a story about {a_one}.",
    "Write a short story about {a_one}.",
    "Can you tell me a story about {a_one}?",
    "Please tell a little story with {a_one} in it.",
    "I would like to hear a story about {a_one}.",
    "Story about {a_one}, please.",
)
_ASK_TWO = (
    "Tell me a story about {a_one} and {a_two}.",
    "Write a story with {a_one} and {a_two}.",
    "Please write a short story about {a_one} who meets {a_two}.",
)
_ASK_ANY = ("Tell me a story.", "Write a short story.", "Can you tell me a story?")


def tale(rng: random.Random, one: str, two: str, name: str | None) -> str:
    """A story of six to ten sentences about `one`, an animal kind, and its friend `two`."""
    place, place2 = rng.sample(w.PLACES, 2)
    thing, thing2 = rng.sample(w.THINGS, 2)
    female = name in w.GIRLS if name else rng.random() < 0.5
    he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
    who = name or f"the {one}"
    feeling, food = rng.choice(w.FEELINGS), rng.choice(w.FOODS)
    colour = rng.choice(w.COLOURS)
    friend = f"the {two}"
    about = {
        "who": who,
        "Who": capital(who),
        "a_who": f"{an(feeling)} {one} called {name}" if name else f"{an(feeling)} {one}",
        "kind": one,
        "he": he,
        "He": capital(he),
        "him": him,
        "his": his,
        "His": capital(his),
        "friend": friend,
        "Friend": capital(friend),
        "place": f"the {place}",
        "place2": f"the {place2}",
        "spot": place,
        "spot2": _SPOTS.get(place, "house"),
        "thing": thing,
        "thing2": thing2,
        "a_thing": f"{an(colour)} {thing}",
        "a_thing2": an(thing2),
        "feeling": feeling,
        "food": food,
        "food_one": "food" if rng.random() < 0.5 else food,
        "good": rng.choice(_GOOD),
        "bad": rng.choice(_BAD),
        "animal2": rng.choice(w.ANIMALS),
        "job": rng.choice(w.JOBS),
        "season": rng.choice(_SEASONS),
    }
    shapes = [rng.choice(_OPENINGS), *rng.sample(_TRAITS, rng.randint(1, 2)), rng.choice(_WISHES)]
    shapes += rng.sample(_TROUBLES, rng.randint(1, 2)) + rng.sample(_TURNS, rng.randint(1, 2))
    shapes += rng.sample(_ENDINGS, rng.randint(1, 2))
    if rng.random() < 0.3:
        shapes.append(rng.choice(_MORALS))
    return " ".join(shape.format(**about) for shape in shapes)


def story(rng: random.Random) -> Sample:
    """A request for a story, perhaps about certain animals."""
    one, two = rng.sample(w.ANIMALS, 2)
    name = rng.choice(w.NAMES) if rng.random() < 0.4 else None
    kind = rng.random()
    called = f" called {name}" if name and rng.random() < 0.5 else ""
    if kind < 0.6:
        ask = rng.choice(_ASK_ONE).format(a_one=an(one) + called)
        plan = f"The user wants a story about {an(one)}{called}."
    elif kind < 0.85:
        ask = rng.choice(_ASK_TWO).format(a_one=an(one) + called, a_two=an(two))
        plan = f"The user wants a story about {an(one)}{called} and {an(two)}."
    else:
        ask, plan = rng.choice(_ASK_ANY), f"The user wants a story. I will take {an(one)}."
    text = tale(rng, one, two, name)
    plan += " I will keep it short and simple, with a good end."
    return Sample("story", text, (user(ask), answer(text, plan)))


_TOPICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "why it rains": (
        "why does it rain",
        (
            "The sun warms the water of seas and lakes.",
            "Some of the water rises into the air as vapour.",
            "High up it is cold, and the vapour turns into tiny drops that form clouds.",
            "When the drops grow heavy, they fall down as rain.",
        ),
    ),
    "why the sky is blue": (
        "why is the sky blue",
        (
            "Sunlight is a mix of all colours.",
            "The air scatters blue light more than red light.",
            "So blue light reaches our eyes from every side of the sky.",
            "In the evening the light has a longer way through the air, and the sky looks red.",
        ),
    ),
    "how plants grow": (
        "how do plants grow",
        (
            "A plant starts as a seed in the soil.",
            "Its roots take up water and minerals.",
            "Its leaves use sunlight to make sugar from water and air.",
            "With this sugar the plant grows new leaves, stems and flowers.",
        ),
    ),
    "why there is day and night": (
        "why is there day and night",
        (
            "The earth is a ball that turns around itself.",
            "It takes about 24 hours for one turn.",
            "On the side that faces the sun it is day.",
            "On the other side it is night.",
        ),
    ),
    "why there are seasons": (
        "why do we have seasons",
        (
            "The axis of the earth is tilted.",
            "So one half of the earth gets more sun for a part of the year.",
            "Where the sun stands high and shines long, it is summer.",
            "Half a year later it is winter there.",
        ),
    ),
    "how bees make honey": (
        "how do bees make honey",
        (
            "Bees collect nectar from flowers.",
            "They carry it to the hive and pass it from bee to bee.",
            "In the comb the water dries out of it.",
            "What stays is thick and sweet: honey.",
        ),
    ),
    "how a boat floats": (
        "why does a boat float",
        (
            "Water pushes up on everything that lies in it.",
            "A boat is hollow, so it is light for its size.",
            "It sinks in until it has pushed away as much water as it weighs.",
            "Then the push and the weight are equal, and the boat floats.",
        ),
    ),
    "how bread is made": (
        "how is bread made",
        (
            "First flour, water, salt and yeast are mixed to a dough.",
            "The yeast makes small bubbles, and the dough rises.",
            "Then the dough is formed to a loaf.",
            "At last it is baked in a hot oven.",
        ),
    ),
    "why leaves fall": (
        "why do leaves fall in autumn",
        (
            "In winter the ground is cold and trees get little water.",
            "Leaves lose a lot of water to the air.",
            "So the tree takes back what is useful in the leaves, and they turn yellow and red.",
            "Then it lets them fall.",
        ),
    ),
    "how a computer counts": (
        "how does a computer count",
        (
            "A computer has many tiny switches.",
            "A switch is either on or off, which stands for one or zero.",
            "With enough ones and zeros it can write every number.",
            "It adds them by simple rules, many million times a second.",
        ),
    ),
    "what a map is": (
        "what is a map",
        (
            "A map is a picture of a place seen from above.",
            "It is much smaller than the place itself.",
            "Signs and colours show roads, rivers and houses.",
            "With a map you can find your way.",
        ),
    ),
    "why we sleep": (
        "why do we need sleep",
        (
            "While we sleep, the body rests and repairs itself.",
            "The brain sorts what it has learned during the day.",
            "Without sleep we get tired and make mistakes.",
            "Children need more sleep than adults.",
        ),
    ),
    "how ice melts": (
        "why does ice melt",
        (
            "Ice is frozen water.",
            "When it gets warmer than zero degrees, its parts begin to move more.",
            "They can no longer hold on to each other.",
            "So the ice turns into water.",
        ),
    ),
    "what a library is": (
        "what is a library",
        (
            "A library is a house full of books.",
            "You can read the books there or take them home.",
            "After some weeks you bring them back.",
            "So many people can read the same book.",
        ),
    ),
    "how birds fly": (
        "how do birds fly",
        (
            "Birds have light bones and strong muscles.",
            "Their wings push the air down and back.",
            "The shape of the wing lifts the bird up.",
            "With its tail a bird can steer and brake.",
        ),
    ),
    "what a language model is": (
        "what is a language model",
        (
            "A language model is a computer program that has read a lot of text.",
            "It has learned which words often follow each other.",
            "When you ask it something, it writes its answer word by word.",
            "It can make mistakes, so important things should be checked.",
        ),
    ),
}
_EXPLAIN_ASKS = (
    "{Q}?",
    "Can you explain {t}?",
    "Explain {t}.",
    "Please explain {t} in simple words.",
    "{Q}? Please answer in a few sentences.",
    "I want to know {t}.",
    "Do you know {t}?",
)
_INTROS = ("", "", "Sure. ", "Good question. ", "Of course. ", "Here is a short answer. ")


def explanation(rng: random.Random) -> Sample:
    """A question of the world and a few sentences that answer it."""
    topic = rng.choice(sorted(_TOPICS))
    question, facts = _TOPICS[topic]
    template = rng.choice(_EXPLAIN_ASKS)
    ask = template.format(Q=capital(question), t=topic)
    text = rng.choice(_INTROS) + " ".join(facts)
    plan = f"The user asks {topic}. I will explain it in simple words."
    return Sample("explain", ask, (user(ask), answer(text, plan)))

"""Running text that is not ours: the language topics of Python's documentation, in every Python.

Licence: PSF, version 2. They give the vocabulary and the model some real English."""

from __future__ import annotations

import random
import re
from functools import cache

from bench.train_demo.data.sample import Sample
from bench.train_demo.data.stories import tale
from bench.train_demo.data.words import ANIMALS


@cache
def paragraphs() -> list[str]:
    """Running text of 80 to 900 characters each, in a fixed order."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:  # some builds of Python leave it out
        return []
    joined = "\n\n".join(topics[name] for name in sorted(topics))
    parts = (re.sub(r"\s+", " ", part).strip() for part in joined.split("\n\n"))
    return [
        part for part in parts if 80 < len(part) < 900 and part[0].isupper() and part[-1] == "."
    ]


def text(rng: random.Random) -> Sample:
    """One paragraph. It has no messages: the text is what the model should go on with."""
    found = paragraphs()
    paragraph = rng.choice(found) if found else tale(rng, *rng.sample(ANIMALS, 2), None)
    return Sample("text", paragraph, (), expect=paragraph)

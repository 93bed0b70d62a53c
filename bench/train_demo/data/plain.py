"""Running text that is not ours: the language topics of Python's documentation, in every Python.

Licence: PSF, version 2. They give the vocabulary and the model some real English."""

from __future__ import annotations

import random
import re
from functools import cache
from pydoc_data.topics import topics

from bench.train_demo.data.sample import Sample


@cache
def paragraphs() -> list[str]:
    """Running text of 80 to 900 characters each, in a fixed order."""
    joined = "\n\n".join(topics[name] for name in sorted(topics))
    parts = (re.sub(r"\s+", " ", part).strip() for part in joined.split("\n\n"))
    return [
        part for part in parts if 80 < len(part) < 900 and part[0].isupper() and part[-1] == "."
    ]


def text(rng: random.Random) -> Sample:
    """One paragraph. It has no messages: the text is what the model should go on with."""
    paragraph = rng.choice(paragraphs())
    return Sample("text", paragraph, (), expect=paragraph)

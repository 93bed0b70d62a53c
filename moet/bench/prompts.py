"""What to ask a server: random prompts of stated lengths, or conversations from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from moet.errors import ConfigError, MoetError

_SYLLABLES = [consonant + vowel for consonant in "bdklmnrs" for vowel in "aeo"]
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant"}
Api = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """body: the part of a request that says what is asked. max_tokens: answer's length at most."""

    body: Mapping[str, Any]
    max_tokens: int


async def random_prompts(
    client: httpx.AsyncClient,
    api: Api,
    model: str,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    seed: int,
) -> list[Prompt]:
    """Prompts of random words, no two alike, cut to length by the server's own tokenizer.

    Lengths are uniform within range_ratio of those stated. A server without /tokenize gets as many
    words as tokens were asked for; what it counted is in the results. For chat, lengths are those
    of the message alone.
    """
    draw = random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        length, limit = (_near(draw, n, range_ratio) for n in (input_len, output_len))
        text = " ".join(_word(draw) for _ in range(length))
        token_ids = await _tokens(client, model, text)
        if api == "completions":
            body: dict[str, Any] = {"prompt": text if token_ids is None else token_ids[:length]}
        else:
            if token_ids is not None:
                text = await _text(client, model, token_ids[:length])
            body = {"messages": [{"role": "user", "content": text}]}
        prompts.append(Prompt(body, limit))
    return prompts


def conversations(path: Path, api: Api, *, num_prompts: int, output_len: int) -> list[Prompt]:
    """The first num_prompts of a file, from the start again if it has fewer.

    JSON or JSON lines; an entry is {"messages": [...]}, {"conversations": [{"from", "value"}]} or
    {"prompt": text}. Messages from the last answer on are left out. Raises ConfigError naming the
    entry that is none of these.
    """
    entries = _entries(path)
    if not entries:
        raise ConfigError(f"--dataset-path {path} has no entries")
    asked = []
    for i in range(num_prompts):
        place = i % len(entries)
        messages = _messages(entries[place], f"{path}, entry {place + 1}")
        text = "\n\n".join(str(message["content"]) for message in messages)
        body: dict[str, Any] = {"messages": messages} if api == "chat" else {"prompt": text}
        asked.append(Prompt(body, output_len))
    return asked


def _near(draw: random.Random, value: int, ratio: float) -> int:
    return max(1, draw.randint(round(value * (1 - ratio)), round(value * (1 + ratio))))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3)))


async def _tokens(client: httpx.AsyncClient, model: str, text: str) -> list[int] | None:
    """Token ids by the server, or None if it does not say."""
    response = await client.post("/tokenize", json={"model": model, "prompt": text})
    if response.status_code in (404, 405):
        return None
    if response.is_error:
        raise MoetError(f"/tokenize answered {response.status_code}: {response.text[:200]}")
    token_ids: list[int] = response.json()["tokens"]
    return token_ids


async def _text(client: httpx.AsyncClient, model: str, token_ids: Sequence[int]) -> str:
    body = {"model": model, "tokens": list(token_ids)}
    response = await client.post("/detokenize", json=body)
    if response.is_error:
        raise MoetError(f"/detokenize answered {response.status_code}: {response.text[:200]}")
    text: str = response.json()["prompt"]
    return text


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            whole: list[Any] = json.loads(text)
            return whole
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(
            f"--dataset-path {path} is neither JSON nor JSON lines: {error}"
        ) from None


def _messages(entry: Any, where: str) -> list[dict[str, Any]]:
    needed = 'an object with "messages", "conversations" or "prompt" is needed'
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is a {type(entry).__name__}; {needed}")
    if isinstance(entry.get("prompt"), str):
        return [{"role": "user", "content": entry["prompt"]}]
    turns: Any = entry.get("messages") or entry.get("conversations")
    try:
        messages = [
            {
                "role": turn.get("role") or _ROLES.get(turn.get("from"), turn.get("from")),
                "content": turn["content"] if "content" in turn else turn["value"],
            }
            for turn in turns
        ]
        while messages[-1]["role"] != "user":
            messages.pop()
    except (TypeError, KeyError, AttributeError, IndexError):
        raise ConfigError(f"{where} has no question in it; {needed}") from None
    return messages

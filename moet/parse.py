"""`moet parse`: raw model output as the message that a client gets. For reports of mangled answers.

The same detokenizer, stop checker and parser as the server's, fed in pieces of any size. Knows no
engine: a model's name is enough for text; token ids need a folder with its tokenizer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from moet.errors import ConfigError, RequestError
from moet.runtime.detokenizer import Piece, StopChecker
from moet.runtime.output import Output, TextAssembler
from moet.runtime.text_side import TextSide, model_folder
from moet.runtime.tokenizer import Tokenizer
from moet.server.chat import deepseek_v4, deepseek_v4_grammar, glm, glm_grammar
from moet.server.chat.encoding import ChatOptions, EncodedPrompt
from moet.server.chat.grammar import Lexicon
from moet.server.chat.messages import Tool, ToolChoice, parse_tool_choice, parse_tools
from moet.server.chat_completions import Message, delta_body
from moet.server.chat_format import chat_format
from moet.server.raw_log import RawChoice
from moet.server.turn import Turn, TurnReader
from moet.types import FinishReason, Request, SamplingParams, TokenEvent

_NAMED = {
    "deepseek-v4-flash": (deepseek_v4_grammar.GRAMMAR, (deepseek_v4.EOS,)),
    "glm-5.2": (glm_grammar.GRAMMAR, ("<|endoftext|>", glm.USER, glm.OBSERVATION)),
}


class _Record(msgspec.Struct):
    """What --log-raw-output writes."""

    model: str
    choices: list[RawChoice]


@dataclass(frozen=True, slots=True)
class Reading:
    """How output is cut and understood. chunk: tokens, or characters of text; None: all at once."""

    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: bool = True
    finish: FinishReason | None = None
    chunk: int | None = 1
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Speech:
    """A model's markup. Without a tokenizer only text can be read, which one of `ends` may end."""

    lexicon: Lexicon
    tokenizer: Tokenizer | None = None
    ends: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: str) -> Speech:
        """By a model's name or folder. Raises ConfigError if it is neither."""
        if model in _NAMED:
            grammar, ends = _NAMED[model]
            return cls(Lexicon(grammar, None), None, ends)
        folder = model_folder(model)
        if not folder.is_dir():
            known = ", ".join(_NAMED)
            raise ConfigError(f"--model {model} is neither a folder nor one of {known}")
        text = TextSide.from_folder(folder)
        return cls(chat_format(text).lexicon, text.tokenizer)


def parse(
    raw: str, speech: Speech, how: Reading, *, name: str = "FILE"
) -> Iterator[dict[str, Any]]:
    """Each delta as {"delta": ...}, then the message with its finish_reason.

    raw: text, a JSON list of token ids, or a file of --log-raw-output, whose first sample is read.
    name: of the input, for errors. Raises ConfigError if ids come without a tokenizer.
    """
    raw, ids, logged = _read(raw, speech, name)
    finish = how.finish or logged or FinishReason.STOP
    if ids is None and speech.tokenizer is not None:
        ids = _spoken(raw, speech.tokenizer)
    if ids is None:
        outputs = _of_text(raw, speech.ends, how, finish)
    else:
        assert speech.tokenizer is not None
        outputs = _of_ids(ids, speech.tokenizer, how, finish)
    options = ChatOptions(thinking=how.thinking, tool_choice=how.tool_choice)
    turn = Turn(messages=(), options=options, params=SamplingParams(), tools=how.tools)
    prompt = EncodedPrompt([], "", "reasoning" if how.thinking else "content")
    reader = TurnReader(turn, speech.lexicon, prompt, speech.tokenizer)
    message, stop_reason = Message(), None
    for output in outputs:
        for delta in reader.read(output):
            message.add(delta)
            yield {"delta": delta_body(delta)}
        stop_reason = output.stop_reason
        if output.finish_reason is not None:
            break
    assert reader.finish is not None
    yield {
        "message": message.body(),
        "finish_reason": reader.finish.finish_reason,
        "stop_reason": stop_reason,
        "reasoning_is_answer": reader.finish.reasoning_is_answer,
        "num_malformed": reader.num_malformed,
    }


def whole(
    raw: str, speech: Speech, how: Reading, *, name: str = "FILE"
) -> Iterator[dict[str, Any]]:
    """The last of `parse`, as an answer that is not streamed: what was all reasoned is content."""
    *_, end = parse(raw, speech, how, name=name)
    if end["reasoning_is_answer"]:
        end["message"]["reasoning"] = end["message"]["reasoning_content"] = None
    yield end


def read_input(file: str) -> str:
    """A file's text, or with "-" that of stdin. Raises ConfigError."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        message = f"{file} is not UTF-8 at byte {error.start}; token ids may go in a JSON list"
        raise ConfigError(message) from None


def read_tools(file: str | None, choice: str | None) -> tuple[list[Tool], ToolChoice]:
    """--tools: a JSON list, or a request that holds one; --tool-choice: a mode or a tool's name."""
    try:
        content = None if file is None else json.loads(read_input(file))
        tools = parse_tools(content.get("tools") if isinstance(content, dict) else content)
        if choice is None or choice in ("auto", "none", "required"):
            return tools, parse_tool_choice(choice, tools)
        return tools, parse_tool_choice({"type": "function", "name": choice}, tools)
    except RequestError as error:
        raise ConfigError(f"--tools {file}, --tool-choice {choice}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"--tools {file} is not JSON: {error}") from None


def _read(raw: str, speech: Speech, name: str) -> tuple[str, list[int] | None, FinishReason | None]:
    """The text, the ids where there are any, and how it ended where that is said."""
    try:
        record = msgspec.json.decode(raw, type=_Record)
        choice = record.choices[0]
    except (msgspec.DecodeError, IndexError):  # what is no record is output as it came
        return raw, _ids(raw, speech, name), None
    reason = choice.finish_reason if choice.finish_reason in ("stop", "length") else "length"
    return choice.text, choice.token_ids if speech.tokenizer else None, FinishReason(reason)


def _ids(raw: str, speech: Speech, name: str) -> list[int] | None:
    try:
        ids = msgspec.json.decode(raw, type=list[int])
    except msgspec.DecodeError:
        return None
    if speech.tokenizer is None:
        if name.endswith(".json"):
            raise ConfigError(f"{name} holds token ids; give --model a folder with a tokenizer")
        return None
    wrong = [i for i in ids if not 0 <= i < speech.tokenizer.vocab_size]
    if wrong:
        last = speech.tokenizer.vocab_size - 1
        raise ConfigError(f"{name} holds the token id {wrong[0]}; the tokenizer's go to {last}")
    return ids


def _spoken(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text whose tags are all the model's own, without a line end behind the end token."""
    ids = tokenizer.encode(text, allow_special=True)
    bare = tokenizer.encode(text.rstrip("\n"), allow_special=True)
    return bare if bare and bare[-1] in tokenizer.eos_token_ids else ids


def _of_ids(
    ids: list[int], tokenizer: Tokenizer, how: Reading, finish: FinishReason
) -> Iterator[Output]:
    request = Request(request_id="", prompt_token_ids=[], params=SamplingParams(stop=how.stop))
    assembler = TextAssembler(0, request, tokenizer)
    ended = finish == FinishReason.STOP and bool(ids) and ids[-1] in tokenizer.eos_token_ids
    size = how.chunk or max(1, len(ids))
    for start in range(0, max(1, len(ids)), size):
        is_last = start + size >= len(ids)
        event = TokenEvent(
            request_id="",
            token_ids=ids[start : start + size],
            finish_reason=finish if is_last else None,
            stop_token_id=ids[-1] if is_last and ended else None,
        )
        yield assembler.push(event)


def _of_text(
    text: str, ends: tuple[str, ...], how: Reading, finish: FinishReason
) -> Iterator[Output]:
    if finish == FinishReason.STOP:
        bare = text.rstrip("\n")
        text = next((bare.removesuffix(end) for end in ends if bare.endswith(end)), text)
    checker = StopChecker(how.stop)
    size = how.chunk or max(1, len(text))
    for start in range(0, len(text), size):
        pieces = checker.push([Piece(text[start : start + size])])
        if checker.matched is not None:
            break
        yield Output(index=0, pieces=pieces, token_ids=[])
    else:
        pieces = checker.finish()
    stopped = checker.matched is not None
    yield Output(
        index=0,
        pieces=pieces,
        token_ids=[],
        finish_reason=FinishReason.STOP if stopped else finish,
        stop_reason=checker.matched,
    )

"""Every way in which clients and flags say whether, how much and how visibly to think.

One table: a meaning, and the places that may state it, the first of them that is given wins. A
request that says anything about thinking overrules the server's defaults on that.

Also: reasoning as a text that a client hands back unread, for APIs whose clients drop what they
can read.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moet.config import ServerConfig
from moet.errors import ConfigError, RequestError

T = TypeVar("T", bool, str, int)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

TEMPLATE = "chat_template_kwargs"
EFFORT = (
    "reasoning_effort",
    "reasoning.effort",
    "output_config.effort",
    f"{TEMPLATE}.reasoning_effort",
)
SWITCH = (
    "enable_thinking",
    "reasoning.enabled",
    "thinking.type",
    f"{TEMPLATE}.thinking",
    f"{TEMPLATE}.enable_thinking",
)
BUDGET = ("thinking_token_budget", "thinking.budget_tokens", "reasoning.max_tokens")
FORGET = (f"{TEMPLATE}.drop_thinking", f"{TEMPLATE}.clear_thinking")
SHOW = ("include_reasoning",)
HIDE = ("reasoning.exclude",)

THINKING_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
DISPLAYS = ("summarized", "omitted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasoning:
    """What a request wants.

    thinking, effort, keep None: the model's own rule. keep: of earlier turns. max_tokens None: no
    budget. hidden: the client does not want to read it.
    """

    thinking: bool | None = None
    effort: str | None = None
    keep: bool | None = None
    max_tokens: int | None = None
    hidden: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningDefaults:
    """The server's word where a request has none; max_tokens bounds every request.

    template_kwargs may hold what a request's chat_template_kwargs may. ConfigError if it holds
    something else, or a value is wrong.
    """

    effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        flag = "--default-chat-template-kwargs"
        for name in self.template_kwargs:
            if f"{TEMPLATE}.{name}" not in (*EFFORT, *SWITCH, *FORGET):
                raise ConfigError(f"{flag} has {name!r:.60}, which means nothing here")
        try:
            _read_request({"reasoning_effort": self.effort, TEMPLATE: self.template_kwargs})
        except RequestError as error:
            raise ConfigError(f"{flag} or --reasoning-effort: {error}") from None


def reasoning_defaults(config: ServerConfig) -> ReasoningDefaults:
    """What the server's flags say. ConfigError if one is wrong."""
    return ReasoningDefaults(
        effort=config.reasoning_effort,
        template_kwargs=config.default_chat_template_kwargs,
        max_tokens=config.max_thinking_tokens,
    )


def read_reasoning(
    fields: Mapping[str, Any], defaults: ReasoningDefaults, *, unless_asked: bool | None = None
) -> Reasoning:
    """Read a request's fields by the table.

    unless_asked: whether to think where neither request nor server says anything.
    Raises RequestError naming the field that is wrong.
    """
    wanted = _read_request(fields)
    server = _read_request(
        {"reasoning_effort": defaults.effort, TEMPLATE: defaults.template_kwargs}
    )
    thinking = wanted.thinking
    if thinking is None and wanted.effort is not None:
        thinking = wanted.effort != "none"
    if thinking is None and not _leaves_it_to_the_model(fields):
        thinking = server.thinking
        if thinking is None and server.effort is None:
            thinking = unless_asked
    limits = [each for each in (wanted.max_tokens, defaults.max_tokens) if each is not None]
    return Reasoning(
        thinking=thinking,
        effort=server.effort if wanted.effort is None else wanted.effort,
        keep=server.keep if wanted.keep is None else wanted.keep,
        max_tokens=min(limits, default=None),
        hidden=wanted.hidden,
    )


def _read_request(fields: Mapping[str, Any]) -> Reasoning:
    effort = _first(fields, EFFORT, str)
    if effort is not None and effort not in EFFORTS:
        at = next(path for path in EFFORT if _at(fields, path) is not None)
        raise RequestError(f"{at} must be one of {', '.join(EFFORTS)}", param=at)
    budget = _first(fields, BUDGET, int)
    if budget is not None and budget < 0:
        at = next(path for path in BUDGET if _at(fields, path) is not None)
        raise RequestError(f"{at} is {budget}; it must be at least 0", param=at)
    forget = _first(fields, FORGET, bool)
    return Reasoning(
        thinking=_first(fields, SWITCH, bool),
        effort=effort,
        keep=None if forget is None else not forget,
        max_tokens=budget,
        hidden=_first(fields, SHOW, bool) is False
        or bool(_first(fields, HIDE, bool))
        or _display(fields) == "omitted",
    )


def _first(fields: Mapping[str, Any], paths: tuple[str, ...], kind: type[T]) -> T | None:
    """The first value that is there; each that is must be of the kind."""
    found: T | None = None
    for path in paths:
        value = _at(fields, path)
        if value is None:
            continue
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            words = {bool: "true or false", str: "a string", int: "an integer"}
            raise RequestError(f"{path} must be {words[kind]}", param=path)
        found = value if found is None else found
    return found


def _at(fields: Mapping[str, Any], path: str) -> object:
    """The value at a path of one or two names; thinking.type as the switch that it is."""
    if path == "thinking.type":
        return THINKING_TYPES.get(_thinking_type(fields))
    name, _, inner = path.partition(".")
    value = fields.get(name)
    if not inner or value is None:
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object", param=name)
    return value.get(inner)


def _thinking_type(fields: Mapping[str, Any]) -> str:
    thinking = fields.get("thinking")
    if thinking is None:
        return ""
    if not isinstance(thinking, Mapping):
        raise RequestError("thinking must be an object", param="thinking")
    kind = thinking.get("type")
    if kind is None:
        return ""
    if not isinstance(kind, str) or kind not in THINKING_TYPES:
        message = f"thinking.type must be one of {', '.join(THINKING_TYPES)}"
        raise RequestError(message, param="thinking.type")
    return kind


def _leaves_it_to_the_model(fields: Mapping[str, Any]) -> bool:
    return _thinking_type(fields) in ("adaptive", "between_tools")


def _display(fields: Mapping[str, Any]) -> object:
    display = _at(fields, "thinking.display")
    if display is not None and display not in DISPLAYS:
        message = f"thinking.display must be one of {', '.join(DISPLAYS)}"
        raise RequestError(message, param="thinking.display")
    return display


_SEAL = "moet1:"


def seal(text: str) -> str:
    """Reasoning as an opaque text to hand back; anyone can read it who wants to."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def unseal(sealed: object) -> str | None:
    """What `seal` was given; None if this is not its work."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


NO_DEFAULTS = ReasoningDefaults()

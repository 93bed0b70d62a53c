"""Starts a coding agent that talks to a moet server: its variables, its settings, its command.

Nothing of the user's own configuration is written: everything goes through variables and flags of
the one process that is started. Knows clients; knows nothing of engines.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moet.config import environment_with
from moet.errors import ConfigError

NO_KEY = "moet"  # clients want one, also where the server does not
TIMEOUT_S = 5.0
SMALL_WINDOW = 32_768  # tokens; below, an agent's own instructions leave no room for work


@dataclass(frozen=True, slots=True)
class Served:
    """What the server says of itself."""

    url: str
    model: str
    max_model_len: int
    key: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is set and what is started. Values of `secrets` variables are not printed."""

    client: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    install: str
    notes: tuple[str, ...] = ()
    secrets: frozenset[str] = frozenset()

    def describe(self, arguments: Sequence[str] = ()) -> str:
        """The same as lines of a shell, with comments; a key is left out."""
        lines = [f"# {note}" for note in self.notes]
        for name, value in self.variables.items():
            shown = '"${MOET_API_KEY:-moet}"' if name in self.secrets else shlex.quote(value)
            lines.append(f"export {name}={shown}")
        return "\n".join([*lines, shlex.join([*self.command, *arguments])])


def prepare(client: str, url: str, *, key: str | None = None, model: str | None = None) -> Plan:
    """Ask the server what it serves and work out how a client is started against it.

    Raises ConfigError if no server answers there, it wants another key, or lacks the model.
    """
    return plan(client, ask(url.rstrip("/"), key=key, model=model))


def plan(client: str, served: Served) -> Plan:
    """How a client is started against a server."""
    made = CLIENTS[client](served)
    if served.max_model_len >= SMALL_WINDOW:
        return made
    note = (
        f"the server's window is {served.max_model_len} tokens; agents need {SMALL_WINDOW} or more "
        "(moet serve --max-model-len)"
    )
    return Plan(client, made.command, made.variables, made.install, (note,), made.secrets)


def _claude(served: Served) -> Plan:
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_MODEL": served.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": served.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": served.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": served.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(32_000, served.max_model_len // 4)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "3000000",
    }
    return Plan(
        "claude",
        ("claude",),
        variables,
        "npm install -g @anthropic-ai/claude-code",
        secrets=frozenset({"ANTHROPIC_AUTH_TOKEN"}),
    )


def _codex(served: Served) -> Plan:
    settings: dict[str, str | int] = {
        "model_provider": "moet",
        "model": served.model,
        "model_context_window": served.max_model_len,
        "model_providers.moet.name": "moet",
        "model_providers.moet.base_url": f"{served.url}/v1",
        "model_providers.moet.env_key": "MOET_CLIENT_KEY",
        "model_providers.moet.wire_api": "responses",
        "model_providers.moet.stream_idle_timeout_ms": 600_000,
    }
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={_toml(value)}")]
    return Plan(
        "codex",
        ("codex", *flags),
        {"MOET_CLIENT_KEY": served.key},
        "npm install -g @openai/codex",
        secrets=frozenset({"MOET_CLIENT_KEY"}),
    )


def _opencode(served: Served) -> Plan:
    model = {
        "name": served.model,
        "tool_call": True,
        "reasoning": True,
        "limit": {
            "context": served.max_model_len,
            "output": min(32_000, served.max_model_len // 4),
        },
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"moet/{served.model}",
        "small_model": f"moet/{served.model}",
        "provider": {
            "moet": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "moet",
                "options": {"baseURL": f"{served.url}/v1", "apiKey": "{env:MOET_CLIENT_KEY}"},
                "models": {served.model: model},
            }
        },
    }
    variables = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "MOET_CLIENT_KEY": served.key}
    return Plan(
        "opencode",
        ("opencode",),
        variables,
        "npm install -g opencode-ai",
        secrets=frozenset({"MOET_CLIENT_KEY"}),
    )


CLIENTS: Mapping[str, Callable[[Served], Plan]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
}


def _toml(value: str | int) -> str:
    """A TOML value; its basic strings are JSON's."""
    return json.dumps(value)


def ask(url: str, *, key: str | None, model: str | None) -> Served:
    """Ask a server for its models; choose the one of that name, or its first."""
    request = urllib.request.Request(f"{url}/v1/models")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            cards = json.load(response)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 401:
            message = f"{url} wants an API key; give --api-key or set MOET_API_KEY"
        elif error.code == 503:
            message = f"the server at {url} is not ready yet; try again when {url}/ready is 200"
        else:
            message = f"{url}/v1/models answers {error.code}; is that a moet server?"
        raise ConfigError(message) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        message = f"no moet server answers at {url} ({reason}); start one with: moet serve MODEL"
        raise ConfigError(message) from None
    by_name = {card["id"]: card for card in cards}
    name = model or next(iter(by_name))
    if name not in by_name:
        message = f"--model is {name!r}; the server at {url} has: {', '.join(by_name)}"
        raise ConfigError(message)
    return Served(url, name, by_name[name]["max_model_len"], key or NO_KEY)


def run(plan: Plan, arguments: Sequence[str]) -> int:
    """Start the client and wait for it; returns its exit code.

    Raises ConfigError, with the command that installs it, if it is not there.
    """
    program = shutil.which(plan.command[0])
    if program is None:
        raise ConfigError(
            f"{plan.command[0]} is not installed; install it with: {plan.install}\n"
            f"or set this by hand:\n{plan.describe(arguments)}"
        )
    words = [program, *plan.command[1:], *arguments]
    return subprocess.run(words, env=environment_with(plan.variables), check=False).returncode

"""Coding agents are started with what they need, and nothing of the user's own is touched."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from moet import launch
from moet.cli import main
from moet.config import ServerConfig
from moet.errors import ConfigError
from moet.launch import Served, plan
from tests.scripted import ScriptedCore
from tests.server.serving import MODEL, listening, scripted_engine

SERVED = Served("http://127.0.0.1:8000", "glm", 131_072, "secret-key")


def test_claude_gets_the_messages_endpoint_and_one_model_for_everything() -> None:
    made = plan("claude", SERVED)
    assert made.variables["ANTHROPIC_BASE_URL"] == SERVED.url
    assert made.variables["ANTHROPIC_AUTH_TOKEN"] == "secret-key"
    models = {value for name, value in made.variables.items() if name.endswith("_MODEL")}
    assert models == {"glm"}


def test_codex_gets_a_provider_by_flags_alone() -> None:
    made = plan("codex", SERVED)
    settings = [word for word in made.command if "=" in word]
    assert list(made.command) == ["codex", *[w for s in settings for w in ("-c", s)]]
    parsed = tomllib.loads("\n".join(settings))
    provider = parsed["model_providers"]["moet"]
    assert (parsed["model"], parsed["model_context_window"]) == ("glm", 131_072)
    assert (provider["wire_api"], provider["base_url"]) == ("responses", SERVED.url + "/v1")
    assert made.variables == {provider["env_key"]: "secret-key"}


def test_opencode_gets_a_provider_by_a_variable() -> None:
    made = plan("opencode", SERVED)
    config = json.loads(made.variables["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "moet/glm"
    assert config["provider"]["moet"]["models"]["glm"]["limit"]["context"] == 131_072
    assert "secret-key" not in made.variables["OPENCODE_CONFIG_CONTENT"]


@pytest.mark.parametrize("client", sorted(launch.CLIENTS))
def test_a_description_can_be_pasted_and_holds_no_key(client: str) -> None:
    text = plan(client, SERVED).describe(["--flag", "two words"])
    assert "secret-key" not in text
    assert text.endswith("--flag 'two words'")
    assert '"${MOET_API_KEY:-moet}"' in text  # some word, where the server has no key


def test_a_small_window_is_mentioned() -> None:
    assert plan("claude", SERVED).notes == ()
    [note] = plan("claude", Served("http://h", "m", 4096, "k")).notes
    assert "--max-model-len" in note


def test_what_the_server_has_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = ServerConfig(api_keys=("k1",), served_model_names=(MODEL, "other"))
    with listening(scripted_engine(ScriptedCore()), config) as (url, _):
        with pytest.raises(ConfigError, match="MOET_API_KEY"):
            launch.prepare("claude", url)
        with pytest.raises(ConfigError, match=r"--model is 'none'.*scripted, other"):
            launch.prepare("claude", url, key="k1", model="none")
        made = launch.prepare("claude", url + "/", key="k1")
        assert made.variables["ANTHROPIC_MODEL"] == MODEL
        monkeypatch.setenv("MOET_API_KEY", "k1")
        assert main(["launch", "codex", "--url", url, "--print", "--", "exec", "hello"]) == 0
        assert capfd.readouterr().out.endswith("exec hello\n")
        # A client that is there is started, with its arguments and variables, and its exit code
        fake = tmp_path / "opencode"
        fake.write_text('#!/bin/sh\necho "$1 $MOET_CLIENT_KEY"\nexit 7\n')
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert main(["launch", "opencode", "--url", url, "--", "run"]) == 7
        assert capfd.readouterr().out == "run k1\n"


def test_a_client_that_is_not_there_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="npm install -g @anthropic-ai/claude-code"):
        launch.run(plan("claude", SERVED), [])


def test_no_server_is_said_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "claude", "--url", "http://127.0.0.1:9"]) == 2
    assert "moet serve" in capfd.readouterr().err

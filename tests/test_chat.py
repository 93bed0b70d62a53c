"""The terminal conversation, over a scripted core."""

from __future__ import annotations

import io

from rich.console import Console

from moet.chat import Chat
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from tests.scripted import ScriptedCore
from tests.server.serving import saying
from tests.texts import byte_tokenizer, text_side


def test_turns_build_a_history_and_show_reasoning_before_the_answer() -> None:
    core = ScriptedCore(saying("why</think>be[cause]"))
    out = io.StringIO()
    lines = iter(["hi", "", "more", "/reset", "new", "/exit", "never"])

    with Engine.over(ThreadHost(lambda progress: core), text_side) as engine:
        engine.wait_until_ready(60)
        chat = Chat(engine, Console(file=out), system="sys", fields={"seed": 3})
        chat.run(lambda: next(lines))
    shown = out.getvalue()
    assert shown.count("why") == shown.count("be[cause]") == 3
    assert shown.index("why") < shown.index("be[cause]")
    prompts = [byte_tokenizer().decode(r.prompt_token_ids) for r in core.submitted]
    assert prompts[0].startswith("sys")
    assert "be[cause]" in prompts[1]
    assert "be[cause]" not in prompts[2]
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["reasoning_content"] == "why"


def test_a_refused_message_leaves_the_history_as_it_was() -> None:
    core = ScriptedCore(max_model_len=60)
    out = io.StringIO()
    with Engine.over(ThreadHost(lambda progress: core), text_side) as engine:
        engine.wait_until_ready(60)
        chat = Chat(engine, Console(file=out), system=None, fields={})
        chat.turn("x" * 100)
    assert chat.messages == []
    assert "60" in out.getvalue()

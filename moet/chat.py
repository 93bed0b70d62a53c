"""A conversation in the terminal. Reasoning is shown dim, before the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rich.console import Console

from moet.errors import RequestError
from moet.runtime.engine import Engine
from moet.server.chat_completions import chat_answer
from moet.server.chat_format import chat_format
from moet.server.openai import ChatRequest

HELP = "/reset begins anew, /exit or end of input leaves, Ctrl-C stops an answer"


class Chat:
    """History and settings of one conversation. `fields` go into every request."""

    def __init__(
        self, engine: Engine, console: Console, *, system: str | None, fields: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._format = chat_format(engine.text)
        self._console = console
        self._fields = fields
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._system)

    def run(self, read: Callable[[], str]) -> None:
        """Take turns until the input ends."""
        self._console.print(HELP, style="dim")
        while True:
            try:
                text = read().strip()
            except (EOFError, KeyboardInterrupt):
                return
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self._system)
            elif text:
                self.turn(text)

    def turn(self, text: str) -> None:
        """Answer one message. What was said before an interruption stays in the history."""
        self.messages.append({"role": "user", "content": text})
        answer: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        try:
            asyncio.run(self._stream(answer))
        except KeyboardInterrupt:
            self._console.print("\n(stopped)", style="dim")
        except RequestError as error:
            self.messages.pop()
            self._console.print(str(error), style="red", markup=False)
            return
        self.messages.append(answer)

    async def _stream(self, answer: dict[str, Any]) -> None:
        body = ChatRequest(messages=self.messages, stream=True, **self._fields)
        prepared = chat_answer(self._engine, self._format, body, self._engine.model)
        generation = await prepared.open()
        try:
            async for chunk in prepared.chunks(generation):
                for choice in chunk["choices"]:
                    self._show(choice["delta"], answer)
        finally:
            generation.close()
        self._console.print()

    def _show(self, delta: dict[str, Any], answer: dict[str, Any]) -> None:
        reasoning, content = delta.get("reasoning_content"), delta.get("content")
        if reasoning:
            answer["reasoning_content"] += reasoning
            self._console.print(reasoning, style="dim italic", end="", markup=False)
        if content:
            if answer["reasoning_content"] and not answer["content"]:
                self._console.print("\n")
            answer["content"] += content
            self._console.print(content, end="", markup=False, highlight=False)

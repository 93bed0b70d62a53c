"""Live servers of both models' formats, for tests that come as an official SDK does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.runtime.text_side import TextSide
from moet.runtime.tokenizer import Tokenizer
from moet.types import Request
from tests.scripted import ScriptedCore
from tests.server import test_glm_chat as glm
from tests.server.serving import MODEL, listening
from tests.texts import byte_tokenizer

DSML_CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n'
    '<｜DSML｜parameter name="item" string="true">bolt</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="depth" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
GLM_CALL = (
    "<tool_call>{name}<arg_key>item</arg_key><arg_value>bolt</arg_value>"
    "<arg_key>depth</arg_key><arg_value>2</arg_value></tool_call>"
)


@dataclass(frozen=True)
class Format:
    """A model's way to write: how a call looks, what ends an answer, where tool results are."""

    model_type: str
    tokenizer: Tokenizer
    vocab_size: int
    call: str
    end: str
    result: str

    def script(self, request: Request) -> list[int]:
        """Think and call a tool until the prompt has a result; then think, if asked, and answer."""
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special=False)
        thinks = prompt.endswith("<think>")
        if self.result not in prompt and "stock" in prompt:
            name = "mcp__stock" if "mcp__stock" in prompt else "stock"
            said = ("Ask.</think>" if thinks else "") + "Wait.\n\n" + self.call.format(name=name)
        else:
            said = ("It says 41.</think>" if thinks else "") + "There are 41."
        return self.tokenizer.encode(said + self.end, allow_special=True)

    def prompts(self, core: ScriptedCore) -> list[str]:
        """Every prompt so far, as text."""
        return [
            self.tokenizer.decode(request.prompt_token_ids, skip_special=False)
            for request in core.submitted
        ]

    @contextmanager
    def serving(
        self, config: ServerConfig | None = None, **options: object
    ) -> Iterator[tuple[str, ScriptedCore]]:
        """A live server's address, and the core behind it."""
        options.setdefault("script", self.script)
        core = ScriptedCore(vocab_size=self.vocab_size, **options)  # type: ignore[arg-type]
        text = TextSide(self.tokenizer, {"model_type": self.model_type})

        def engine(on_death: object) -> Engine:
            host = ThreadHost(lambda progress: core)
            return Engine.over(host, lambda: text, model=MODEL, on_death=on_death)  # type: ignore[arg-type]

        with listening(engine, config) as (url, _):
            yield url, core
            assert not core.open


DEEPSEEK = Format(
    "deepseek_v4", byte_tokenizer(), 1000, DSML_CALL, "<｜end▁of▁sentence｜>", "<tool_result>"
)
GLM = Format("glm_moe_dsa", glm.TOKENIZER, glm.VOCAB, GLM_CALL, "<|user|>", "<tool_response>")
FORMATS = [DEEPSEEK, GLM]

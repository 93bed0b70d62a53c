"""What a model folder says about text: tokenizer, model type, default sampling."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moet.config import EngineConfig
from moet.errors import ConfigError
from moet.runtime.tokenizer import Tokenizer
from moet.types import SamplingParams

DEMOS = {"demo": "deepseek-v4", "demo-glm": "glm"}  # name: folder inside the package
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class TextSide:
    """config is the model folder's config.json; defaults hold where a request says nothing.

    chat_template is the text of chat_template.jinja, which not every model ships.
    """

    tokenizer: Tokenizer
    config: dict[str, Any]
    defaults: SamplingParams = field(default_factory=SamplingParams)
    chat_template: str | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> TextSide:
        """Read the configs and the tokenizer. ConfigError names the file that is wrong."""
        generation = _read_object(folder / "generation_config.json", required=False)
        given = {name: generation[name] for name in DEFAULTS if generation.get(name) is not None}
        if generation.get("do_sample") is False:
            given["temperature"] = 0.0
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(
                    f"{folder / 'generation_config.json'}: {name} is {value!r}; it must be a number"
                )
        template = folder / "chat_template.jinja"
        return cls(
            tokenizer=Tokenizer.from_folder(folder),
            config=_read_object(folder / "config.json", required=True),
            defaults=SamplingParams(**given),
            chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
        )

    def within(self, max_tokens: int) -> TextSide:
        """This one for prompts of at most so many tokens."""
        return replace(self, tokenizer=self.tokenizer.within(max_tokens))


def model_folder(model: str) -> Path:
    """A model's folder by the name that a user gives it; demo models come with the package."""
    if model in DEMOS:
        return Path(__file__).parents[1] / "demo" / DEMOS[model]
    return Path(model)


def existing_folder(model: str) -> Path:
    """A model's folder, which has to be there; ConfigError if it is not."""
    folder = model_folder(model)
    if not folder.is_dir():
        demos = " or ".join(DEMOS)
        message = f"{model} is no folder; give a checkpoint or pack folder, or {demos}"
        owner, slash, name = model.partition("/")
        if slash and owner.strip(".~") and name and "/" not in name:
            message += f"; if that is a model of a hub: hf download {model} --local-dir {name}"
        raise ConfigError(message)
    return folder


def text_folder(config: EngineConfig) -> Path:
    """Where a model's tokenizer and config.json are; with dummy weights it may have no others."""
    if config.target.weights == "checkpoint":
        return model_folder(config.model)
    from moet.runtime.dummy import dummy_folder  # imports the models

    return dummy_folder(config.model)


def _read_object(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ConfigError(f"{path} is missing; is {path.parent} a model folder?")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content

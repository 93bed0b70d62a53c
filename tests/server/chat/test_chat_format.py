"""The registry of chat formats."""

import pytest

from moet.errors import ConfigError
from moet.server.chat import chat_format
from moet.server.chat.deepseek_v4 import EFFORT_HIGH
from moet.server.chat.encoding import ChatOptions
from moet.server.chat.messages import Message
from tests.text_fixtures import byte_tokenizer, released_tokenizer


def test_the_revision_decides_the_effort_prompt():
    def prompt(config):
        form = chat_format({"model_type": "deepseek_v4", **config}, released_tokenizer())
        return form.encoding.encode([Message("user", "u")], [], ChatOptions()).text

    assert EFFORT_HIGH not in prompt({})
    assert EFFORT_HIGH in prompt({"dspark_block_size": 5})


@pytest.mark.parametrize("model_type", ["llama", None, ["deepseek_v4"]])
def test_an_unknown_model_type_is_named(model_type):
    with pytest.raises(ConfigError, match="deepseek_v4"):
        chat_format({"model_type": model_type}, released_tokenizer())


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="control token"):
        chat_format({"model_type": "deepseek_v4"}, byte_tokenizer())

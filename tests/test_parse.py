"""`moet parse`: the message of a raw output, however it is cut and wherever it comes from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from moet.cli import main
from moet.models.synthetic_tokenizer_glm import END_TOKENS, tokenizer_json
from moet.runtime.tokenizer import Tokenizer
from moet.server.raw_log import RawChoice, RawLog, RawRecord

DSML_CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">杭州</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>\n"
)
GLM_CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>杭州</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><|observation|>\n"
)
CALLS = {"deepseek-v4-flash": DSML_CALL, "glm-5.2": GLM_CALL}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}},
}
TOKENIZER = json.dumps(tokenizer_json(512))


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([WEATHER, {"name": "now"}]))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """What of a GLM model folder the text side reads."""
    made = tmp_path / "glm"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa"}))
    (made / "tokenizer.json").write_text(TOKENIZER, encoding="utf-8")
    ids = [Tokenizer(TOKENIZER).control_id(text) for text in END_TOKENS]
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return str(made)


class Moet:
    """Runs `moet parse` on some content."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._capsys = path, capsys

    def lines(self, content: str, *words: str) -> list[dict[str, Any]]:
        self.path.write_bytes(content.encode())
        assert main(["parse", *words, str(self.path)]) == 0
        return [json.loads(line) for line in self._capsys.readouterr().out.splitlines()]

    def __call__(self, content: str, *words: str) -> dict[str, Any]:
        (line,) = self.lines(content, *words)
        for call in line["message"].get("tool_calls", []):
            del call["id"]  # drawn anew each time
        return line

    def failure(self, *words: str) -> str:
        assert main(["parse", *words]) == 2
        return self._capsys.readouterr().err


@pytest.fixture
def parse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Moet:
    return Moet(tmp_path / "raw.txt", capsys)


def calls(line: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in line["message"].get("tool_calls", [])]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


@pytest.mark.parametrize("model", CALLS)
def test_a_name_is_enough_for_text_and_its_cut_does_not_matter(
    model: str, parse: Moet, tools: str
) -> None:
    raw = "why</think>Look:\n\n" + CALLS[model]
    whole = parse(raw, "--model", model, "--tools", tools, "--chunk", "all")
    assert whole["message"]["reasoning_content"] == whole["message"]["reasoning"] == "why"
    assert whole["message"]["content"] == "Look:"
    assert calls(whole) == [("weather", {"city": "杭州", "days": 3})]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("tool_calls", None)
    assert whole["num_malformed"] == 0
    for size in ("1", "2", "7"):
        assert parse(raw, "--model", model, "--tools", tools, "--chunk", size) == whole


@pytest.mark.parametrize("model", CALLS)
def test_deltas_join_to_the_message(model: str, parse: Moet, tools: str) -> None:
    raw = "why</think>Look:\n\n" + CALLS[model]
    *deltas, end = parse.lines(raw, "--model", model, "--tools", tools, "--stream")
    texts = {"reasoning_content": "", "content": "", "arguments": ""}
    for line in deltas:
        delta = line["delta"]
        for call in delta.pop("tool_calls", ()):
            texts["arguments"] += call["function"]["arguments"]
        for name, text in delta.items():
            if name in texts:
                texts[name] += text
    message = end["message"]
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert list(texts.values()) == [message["reasoning"], message["content"], arguments]
    assert len(deltas) > 5


@pytest.mark.bug("P10")
@pytest.mark.parametrize("model", CALLS)
@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), ("weather", "stop"), ("none", "stop")],
)
def test_p10_finish_reason_in_every_cell(
    model: str, stream: list[str], choice: str, reason: str, parse: Moet, tools: str
) -> None:
    words = ["--model", model, "--tools", tools, "--tool-choice", choice, *stream]
    end = parse.lines("x</think>" + CALLS[model], *words)[-1]
    assert end["finish_reason"] == reason
    assert len(calls(end)) == (choice != "none")
    assert "tool_call" not in (end["message"]["content"] or "")


@pytest.mark.bug("P01")
def test_p01_a_call_without_arguments(parse: Moet, tools: str) -> None:
    raw = "<tool_call>now</tool_call>"
    line = parse(raw, "--model", "glm-5.2", "--tools", tools, "--thinking", "off")
    assert calls(line) == [("now", {})]


@pytest.mark.bug("P02")
def test_p02_a_lost_opening_value_tag_keeps_the_value_and_is_counted(
    parse: Moet, tools: str
) -> None:
    raw = "</think><tool_call>weather<arg_key>city</arg_key>Rome</arg_value></tool_call>"
    line = parse(raw, "--model", "glm-5.2", "--tools", tools)
    assert calls(line) == [("weather", {"city": "Rome"})]
    assert line["num_malformed"] == 1


@pytest.mark.bug("P11")
def test_p11_reasoning_that_never_ended_is_the_answer_unless_cut(parse: Moet) -> None:
    words = ["--model", "deepseek-v4-flash"]
    ended = parse("It is 4.<｜end▁of▁sentence｜>", *words)
    assert (ended["message"]["content"], ended["message"]["reasoning"]) == ("It is 4.", None)
    cut = parse("It is 4.", *words, "--finish", "length")
    assert (cut["message"]["content"], cut["message"]["reasoning"]) == ("", "It is 4.")
    assert cut["finish_reason"] == "length"


def test_a_stop_string_ends_the_answer(parse: Moet, folder: str) -> None:
    for model in ("glm-5.2", folder):
        words = ["--model", model, "--thinking", "off", "--stop", "END", "--stop", "never"]
        for size in ("1", "all"):
            line = parse("one EN two END three", *words, "--chunk", size, "--finish", "length")
            assert line["message"]["content"] == "one EN two "
            assert (line["finish_reason"], line["stop_reason"]) == ("stop", "END")


def test_ids_text_and_log_make_the_same_message(parse: Moet, tools: str, folder: str) -> None:
    raw = "why 😀</think>Look: " + GLM_CALL
    expected = parse(raw, "--model", "glm-5.2", "--tools", tools)
    ids = Tokenizer(TOKENIZER).encode(raw.rstrip("\n"), allow_special=True)
    text = raw.removesuffix("<|observation|>\n")
    choice = RawChoice(index=0, text=text, token_ids=ids, finish_reason="stop")
    record = RawRecord("chatcmpl-1", "m")
    record.choices[0] = choice
    log = RawLog(parse.path.parent / "log")
    log.write(record)
    logged = (log.folder / "chatcmpl-1.json").read_text(encoding="utf-8")
    for content in (raw, json.dumps(ids), logged):
        for size in ("1", "3", "all"):
            assert parse(content, "--model", folder, "--tools", tools, "--chunk", size) == expected
    assert parse(logged, "--model", "glm-5.2", "--tools", tools) == expected


def test_a_log_says_how_the_answer_ended(parse: Moet) -> None:
    choice = {"index": 0, "text": "hm", "token_ids": [1], "finish_reason": "length"}
    logged = json.dumps({"id": "x", "model": "m", "choices": [choice]})
    assert parse(logged, "--model", "glm-5.2")["finish_reason"] == "length"
    assert parse(logged, "--model", "glm-5.2", "--finish", "stop")["finish_reason"] == "stop"


def test_only_ids_tell_a_tag_from_text_that_looks_like_one(parse: Moet, folder: str) -> None:
    ids = Tokenizer(TOKENIZER).encode("see </think> here")
    line = parse(json.dumps(ids), "--model", folder, "--thinking", "off")
    assert line["message"]["content"] == "see </think> here"


def test_an_empty_answer_and_a_request_as_tools(parse: Moet, folder: str, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "m", "tools": [WEATHER]}))
    for model in ("glm-5.2", folder):
        for content in ("", "[]") if model == folder else ("",):
            line = parse(content, "--model", model, "--tools", str(request))
            assert (line["message"]["content"], line["finish_reason"]) == ("", "stop")


def test_stdin(parse: Moet, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stdin = io.TextIOWrapper(io.BytesIO("wh</think>é".encode()), encoding="ascii")
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["parse", "--model", "glm-5.2", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["message"]["content"] == "é"


def test_what_is_wrong_is_named(parse: Moet, folder: str, tools: str, tmp_path: Path) -> None:
    file, ids = tmp_path / "a.txt", tmp_path / "ids.json"
    file.write_bytes(b"ab\xff")
    ids.write_text("[1, 999999]")
    named = ["--model", "glm-5.2"]
    assert "nowhere.txt: No such file" in parse.failure(*named, str(tmp_path / "nowhere.txt"))
    assert "not UTF-8 at byte 2" in parse.failure(*named, str(file))
    assert "give --model a folder" in parse.failure(*named, str(ids))
    assert "the token id 999999; the tokenizer's" in parse.failure("--model", folder, str(ids))
    assert "deepseek-v4-flash, glm-5.2" in parse.failure("--model", "glm-0", str(file))
    assert "'x', which is not" in parse.failure(*named, "--tool-choice", "x", str(file))
    ids.write_text("[{]")
    assert "is not JSON" in parse.failure(*named, "--tools", str(ids), str(file))
    ids.write_text('[{"type": 5}]')
    assert "tools[0]" in parse.failure(*named, "--tools", str(ids), str(file))
    with pytest.raises(SystemExit):
        main(["parse", *named, "--chunk", "0", str(file)])

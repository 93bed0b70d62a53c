"""Tokenizing: ids of the released vocabulary, untrusted text, what a folder must hold."""

import json
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError, RequestError
from moet.runtime.tokenizer import Span, Tokenizer
from tests.text_fixtures import RELEASED, byte_tokenizer, byte_tokenizer_json, released_tokenizer

CONTROL_WORDS = ["<think>", "</think>", "<｜User｜>", "｜DSML｜", "<｜end▁of▁sentence｜>"]
untrusted = st.lists(st.sampled_from([*CONTROL_WORDS, "a", " b", "\n\n", "é🙂", "<", "｜", "12"]))


def test_ids_of_the_released_vocabulary():
    tokenizer = released_tokenizer()
    assert tokenizer.vocab_size == 129_280
    assert tokenizer.encode("<｜DSML｜tool_calls>", allow_special=True) == [
        30, 128825, 72461, 4941, 12548, 32,
    ]  # fmt: skip
    assert tokenizer.control_id("｜DSML｜") == 128825
    assert [tokenizer.control_id(t) for t in ("<think>", "</think>")] == [128821, 128822]
    assert tokenizer.encode("") == []


def test_control_tokens_of_untrusted_text_stay_text():
    tokenizer = released_tokenizer()
    text = "".join(CONTROL_WORDS)
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_control(i) for i in ids)
    assert tokenizer.decode(ids) == text
    trusted = tokenizer.encode(text, allow_special=True)
    assert trusted == [tokenizer.control_id(word) for word in CONTROL_WORDS]


def test_a_control_token_may_not_be_pieced_together_across_spans():
    tokenizer = released_tokenizer()
    for spans in ([Span("<thi", True), Span("nk>")], [Span("<thi"), Span("nk>", True)]):
        assert not any(tokenizer.is_control(i) for i in tokenizer.encode_spans(spans))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(untrusted.map("".join), st.booleans()), max_size=6))
def test_spans_hold_exactly_the_trusted_control_tokens(parts):
    tokenizer = released_tokenizer()
    ids = tokenizer.encode_spans([Span(text, trusted) for text, trusted in parts])
    assert tokenizer.decode(ids, skip_special=False) == "".join(text for text, _ in parts)
    expected = [
        i
        for text, trusted in parts
        if trusted
        for i in tokenizer.encode(text, allow_special=True)
        if tokenizer.is_control(i)
    ]
    assert [i for i in ids if tokenizer.is_control(i)] == expected


def test_words_cross_span_borders():
    tokenizer = released_tokenizer()
    spans = [Span("<｜User｜>", True), Span("Hello."), Span("\n\nWor", True), Span("ld")]
    joined = tokenizer.encode("<｜User｜>Hello.\n\nWorld", allow_special=True)
    assert tokenizer.encode_spans(spans) == joined


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
@example("삼겹살 😀 \u200d\r\n\t 0123456789 <｜User｜>")
def test_round_trip_and_agreement_with_the_library(text):
    tokenizer = released_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode(text, allow_special=True)
    assert ids == _library().encode(text, add_special_tokens=False).ids


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 129_279), max_size=20), st.booleans())
def test_decode_agrees_with_the_library(ids, skip_special):
    expected = _library().decode(ids, skip_special_tokens=skip_special)
    assert released_tokenizer().decode(ids, skip_special=skip_special) == expected


@cache
def _library():
    return tokenizers.Tokenizer.from_file(str(RELEASED))


def test_an_id_beyond_the_tokenizer_has_no_text():
    assert byte_tokenizer().decode([104, 105, 5000]) == "hi"


@pytest.mark.bug("P20")
def test_p20_a_lone_surrogate_is_the_callers_fault():
    tokenizer = byte_tokenizer()
    for allow_special in (False, True):
        with pytest.raises(RequestError, match="lone surrogate at character 4"):
            tokenizer.encode("cut \ud83d", allow_special=allow_special)
    assert tokenizer.decode(tokenizer.encode("\U0001f600")) == "😀"


def test_missing_control_token_is_named():
    with pytest.raises(ConfigError, match="'｜DSML｜'"):
        byte_tokenizer().control_id("｜DSML｜")
    with pytest.raises(ConfigError, match="'a'"):
        byte_tokenizer().control_id("a")  # a word of the vocabulary, but no control token


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_folder_end_tokens_in_order_of_precedence(tmp_path):
    write(tmp_path, "tokenizer.json", byte_tokenizer_json())
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == ()
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<eos>"}})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (256,)
    write(tmp_path, "config.json", {"eos_token_id": 7})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (7,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [256, 3]})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (256, 3)


def test_folder_faults_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, "tokenizer.json", "{")
    with pytest.raises(ConfigError, match="not a tokenizer file"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, "tokenizer.json", json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises(ConfigError, match="byte-level BPE"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, "tokenizer.json", byte_tokenizer_json())
    write(tmp_path, "config.json", {"eos_token_id": 9999})
    with pytest.raises(ConfigError, match="9999"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, "config.json", "[]")
    with pytest.raises(ConfigError, match=r"config\.json does not hold a JSON object"):
        Tokenizer.from_folder(tmp_path)

"""/v1/completions: text, shape of chunks, log-probabilities, echo, samples."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import MODEL, saying, serving
from tests.texts import ids

PATH = "/v1/completions"


def test_a_plain_answer_has_text_reason_and_usage() -> None:
    with serving(saying("hello")) as api:
        body = api.post(PATH, {"model": MODEL, "prompt": "four"}).json()
        assert body["object"] == "text_completion"
        assert body["model"] == MODEL
        [choice] = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
        assert choice["logprobs"] is None
        assert body["usage"] == {
            "prompt_tokens": 4,
            "completion_tokens": 6,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


def test_max_tokens_is_sixteen_unless_said_and_ends_by_length() -> None:
    with serving(saying("x" * 100)) as api:
        choice = api.post(PATH, {"prompt": "p"}).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("x" * 16, "length")
        choice = api.post(PATH, {"prompt": "p", "max_tokens": 3}).json()["choices"][0]
        assert choice["text"] == "xxx"


@pytest.mark.bug("P16")
def test_p16_chunks_have_a_null_reason_until_the_last_and_usage_comes_alone() -> None:
    with serving(saying("abc")) as api:
        options = {"stream_options": {"include_usage": True}}
        chunks = api.chunks(PATH, {"prompt": "p", **options})
        *text, usage = chunks
        assert [c["choices"][0]["finish_reason"] for c in text] == [None, None, None, "stop"]
        assert "".join(c["choices"][0]["text"] for c in text) == "abc"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4
        assert all("usage" not in chunk for chunk in text)
        assert len({chunk["id"] for chunk in chunks}) == 1
        chunks = api.chunks(PATH, {"prompt": "p"})
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_continuous_usage_only_grows() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with serving(saying("abc")) as api:
        chunks = api.chunks(PATH, {"prompt": "p", "stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] == 1
        assert counts[-1] == 4


@pytest.mark.bug("P14")
def test_p14_no_part_of_a_stop_string_is_streamed() -> None:
    with serving(saying("a red kite sings")) as api:
        body = {"prompt": "p", "stop": ["red kite"], "max_tokens": 50}
        chunks = api.chunks(PATH, body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["choices"][0]["stop_reason"] == "red kite"
        whole = api.post(PATH, {**body, "include_stop_str_in_output": True}).json()
        assert whole["choices"][0]["text"] == "a red kite"


@pytest.mark.bug("S16")
def test_s16_held_text_makes_no_empty_chunks() -> None:
    with serving(saying("abcdefgh")) as api:
        chunks = api.chunks(PATH, {"prompt": "p", "stop": "a" + "b" * 30, "max_tokens": 50})
        texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
        assert all(texts)
        body = {"prompt": "p", "stop": ["abcdefgX"], "max_tokens": 50}
        chunks = api.chunks(PATH, body)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["abcdefgh", ""]


def test_logprobs_cover_every_token_in_both_modes() -> None:
    with serving(saying("añb")) as api:
        body = {"prompt": "p", "logprobs": 1}
        whole = api.post(PATH, body).json()["choices"][0]["logprobs"]
        assert whole["tokens"][0] == "a"
        assert whole["tokens"][1:3] == ["bytes:\\xc3", "bytes:\\xb1"]
        assert len(whole["tokens"]) == 5
        assert whole["token_logprobs"] == [-0.25] * 5
        assert all(
            top["a" if i == 0 else token] == -0.25
            for i, (token, top) in enumerate(
                zip(whole["tokens"], whole["top_logprobs"], strict=True)
            )
        )
        parts = [c["choices"][0]["logprobs"] for c in api.chunks(PATH, body)]
        joined: dict[str, Any] = {
            key: [item for part in parts for item in part[key]] for key in whole
        }
        assert joined == whole


@pytest.mark.bug("S01")
def test_s01_echo_without_new_tokens_returns_the_prompt_and_its_logprobs() -> None:
    with serving(saying("never")) as api:
        body = {"prompt": "a b", "echo": True, "max_tokens": 0, "logprobs": 1}
        answer = api.post(PATH, body).json()
        [choice] = answer["choices"]
        assert choice["text"] == "a b"
        assert choice["logprobs"]["tokens"] == ["a", " ", "b"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        chunks = api.chunks(PATH, body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a b"


def test_echo_precedes_the_answer() -> None:
    with serving(saying("c")) as api:
        body = {"prompt": "ab", "echo": True, "logprobs": 0}
        choice = api.post(PATH, body).json()["choices"][0]
        assert choice["text"] == "abc"
        assert choice["logprobs"]["tokens"][:3] == ["a", "b", "c"]


def test_prompts_come_as_text_or_ids_one_or_many() -> None:
    with serving() as api:
        for prompt, texts in (
            ("ab", ["ab"]),
            (ids("cd"), ["cd"]),
            (["ab", "cd"], ["ab", "cd"]),
            ([ids("ef"), ids("g")], ["ef", "g"]),
        ):
            body = api.post(PATH, {"prompt": prompt}).json()
            assert [choice["text"] for choice in body["choices"]] == texts


@pytest.mark.bug("P21")
def test_p21_samples_have_their_own_choices_and_the_prompt_counts_once() -> None:
    def seeded(request: Any) -> list[int]:
        return ids(f"{request.params.seed % 1000}.")

    with serving(seeded) as api:
        body = {"prompt": ["p", "qq"], "n": 3, "seed": 7, "temperature": 1}
        whole = api.post(PATH, body).json()
        texts = [choice["text"] for choice in whole["choices"]]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3, 4, 5]
        assert len(set(texts[:3])) == 3
        assert texts[:3] == texts[3:]
        assert whole["usage"]["prompt_tokens"] == 3
        streamed = [""] * 6
        for chunk in api.chunks(PATH, body):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert streamed == texts


def test_prompt_logprobs_and_token_ids_on_request() -> None:
    with serving(saying("c")) as api:
        body = {"prompt": "ab", "prompt_logprobs": 0, "return_token_ids": True}
        choice = api.post(PATH, body).json()["choices"][0]
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert second[str(ids("b")[0])] == {"logprob": -0.25, "decoded_token": "b"}
        assert choice["prompt_token_ids"] == ids("ab")
        assert choice["token_ids"][0] == ids("c")[0]


def test_a_suffix_is_what_the_answer_leads_to() -> None:
    with serving(saying("x")) as api:
        asked = {"prompt": "def f(", "suffix": "):<think>"}
        assert api.post(PATH, asked).json()["choices"][0]["text"] == "x"
        [begin, *before] = ids("<｜fim▁begin｜>def f(")
        [hole] = ids("<｜fim▁hole｜>")
        [_, *prompt] = api.core.submitted[-1].prompt_token_ids
        assert prompt[: len(before) + 2] == [begin, *before, hole]
        assert len(prompt) == len(before) + 2 + len("):<think>") + 1  # text makes no control token
        assert api.post(PATH, {**asked, "echo": True}).status_code == 400

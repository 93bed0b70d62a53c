"""Incremental text: no broken characters, no half stop strings, and never a lost or changed one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.runtime.detokenizer import Detokenizer, Piece, StopChecker, plain_text
from tests.text_fixtures import byte_tokenizer, released_tokenizer


def cuts(items, seed):
    """The items in random runs, some of them empty."""
    rng = random.Random(seed)
    items = list(items)
    while items:
        size = rng.choice([0, 1, 1, 2, 3, 7])
        yield items[:size]
        items = items[size:]


def stream(tokenizer, chunks):
    """All deltas of a sequence, the tail last."""
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(chunk) for chunk in chunks] + [detokenizer.finish()]


@pytest.mark.bug("P15")
def test_p15_a_character_waits_for_its_bytes():
    deltas = stream(
        byte_tokenizer(), [[0xF0, 0x9F], [0x98], [0x80], *[[b] for b in "삼겹살".encode()]]
    )
    texts = [plain_text(delta) for delta in deltas]
    assert texts == ["", "", "😀", "", "", "삼", "", "", "겹", "", "", "살", ""]


@pytest.mark.bug("P15")
def test_p15_an_unfinished_tail_is_flushed_once():
    deltas = stream(byte_tokenizer(), [[104], [0xF0], [0x9F]])
    assert [plain_text(delta) for delta in deltas] == ["h", "", "", "�"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=40), st.integers())
def test_any_cut_equals_the_one_shot_decode(ids, seed):
    tokenizer = byte_tokenizer()
    deltas = stream(tokenizer, cuts(ids, seed))
    pieces = [piece for delta in deltas for piece in delta]
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids, skip_special=False)
    assert [p.token_id for p in pieces if p.token_id is not None] == [i for i in ids if i > 255]
    assert all(piece.text for piece in pieces)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=30), st.integers())
def test_valid_text_never_shows_a_replacement_character(text, seed):
    tokenizer = released_tokenizer()
    ids = tokenizer.encode(text)
    shown = "".join(plain_text(delta) for delta in stream(tokenizer, cuts(ids, seed)))
    assert shown == text


def test_control_tokens_are_pieces_of_their_own():
    (delta, _) = stream(byte_tokenizer(), [[104, 105, 257, 0xE2, 258, 256, 97]])
    assert delta == [
        Piece("hi"),
        Piece("<think>", 257),
        Piece("�"),
        Piece("</think>", 258),
        Piece("<eos>", 256, special=True),
        Piece("a"),
    ]
    assert plain_text(delta) == "hi<think>�</think>a"


def run_stops(stops, texts, **options):
    """Deltas of a stream of texts, up to the match."""
    checker = StopChecker(stops, **options)
    deltas = []
    for text in texts:
        deltas.append(plain_text(checker.push([Piece(text)] if text else [])))
        if checker.matched is not None:
            return deltas, checker.matched
    return [*deltas, plain_text(checker.finish())], None


@pytest.mark.bug("P14")
def test_p14_no_part_of_a_stop_string_is_shown():
    assert run_stops(["red kite"], ["a ", "red", " kite", " sings"]) == (["a ", "", ""], "red kite")
    assert run_stops(["\n### "], ["x\n", "##", "# y"]) == (["x", "", ""], "\n### ")
    deltas, matched = run_stops(["red kite"], ["a ", "red", " king", " sings"])
    assert (deltas, matched) == (["a ", "", "red king", " sings", ""], None)
    deltas, matched = run_stops(["red kite"], ["a ", "red", " k"])
    assert (deltas, matched) == (["a ", "", "", "red k"], None)


@pytest.mark.bug("P14")
def test_p14_include_stop_str_in_output():
    deltas, matched = run_stops(["red kite"], ["a ", "red", " kite sings"], include_stop=True)
    assert ("".join(deltas), matched) == ("a red kite", "red kite")


def test_overlapping_stops_the_first_completed_wins():
    assert run_stops(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run_stops(["bc", "abc"], ["xabcd"]) == (["x"], "abc")
    assert run_stops(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


@pytest.mark.bug("S16")
def test_s16_nothing_is_held_that_cannot_complete_a_stop():
    deltas, _ = run_stops(["x" * 30], ["one ", "two ", "x", "x", "three"])
    assert deltas == ["one ", "two ", "", "", "xxthree", ""]


def naive(stops, text):
    """First stop by end, longest first among equals: (what comes before it, which)."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.text("abc", max_size=30),
    st.integers(),
    st.booleans(),
)
def test_any_cut_stops_at_the_same_place(stops, text, seed, include_stop):
    chunks = ["".join(chunk) for chunk in cuts(text, seed)]
    deltas, matched = run_stops(stops, chunks, include_stop=include_stop)
    before, expected = naive(stops, text)
    assert matched == expected
    assert "".join(deltas) == before + (expected or "" if include_stop else "")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.text("abc", min_size=1, max_size=30),
)
def test_only_a_possible_beginning_is_held_back(stops, text):
    checker = StopChecker(stops)
    shown = "".join(plain_text(checker.push([Piece(char)])) for char in text)
    if checker.matched is None:
        rest = text[len(shown) :]
        assert text.startswith(shown)
        assert not rest or any(stop.startswith(rest) for stop in stops)


def test_control_tokens_keep_their_place_and_their_identity():
    checker = StopChecker(["k>ab"])
    think, eos = Piece("<think>", 5), Piece("<eos>", 6, special=True)
    assert checker.push([Piece("x"), think]) == [Piece("x")]
    assert checker.push([Piece("a")]) == []
    assert checker.push([Piece("c"), eos]) == [think, Piece("a"), Piece("c"), eos]
    assert checker.push([think, Piece("a"), eos, Piece("b")]) == [Piece("<thin")]
    assert checker.matched == "k>ab"


def test_without_stops_pieces_pass_as_they_are():
    pieces = [Piece("a"), Piece("<eos>", 1, special=True)]
    checker = StopChecker([])
    assert checker.push(pieces) == pieces
    assert checker.finish() == []


def test_the_most_stops_that_validation_lets_through():
    stops = [chr(0x4E00 + i) * 300 + "end" for i in range(64)]
    text = "".join(chr(0x4E00 + i) * 299 + "." for i in range(64)) + stops[63]
    deltas, matched = run_stops(stops, [text[i : i + 4] for i in range(0, len(text), 4)])
    assert matched == stops[63]
    assert "".join(deltas) == text[: -len(stops[63])]

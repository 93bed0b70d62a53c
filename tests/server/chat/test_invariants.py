"""What holds of every answer, tried on random ones, and guided by coverage where that is there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moet.server.chat.parser import ContentDelta, OutputParser
from tests.server.chat.invariants import DSML, GLM, case_of, check

ROOT = Path(__file__).parents[3]
GLM_BIT, TOOLS_BIT = 1, 4
CALL = bytes(DSML.index(part) for part in ("<｜DSML｜tool_calls>\n", '<｜DSML｜invoke name="'))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
@example(b"\0\0" + bytes(map(DSML.index, ("</｜DSML｜", "</think>"))))
@example(bytes((TOOLS_BIT, 0)) + CALL + bytes(map(DSML.index, ("｜DSML｜", '">'))))
def test_every_answer_is_one_that_a_client_can_use(data: bytes) -> None:
    check(data)


def test_bytes_spell_both_models_markup() -> None:
    tags = ("<tool_call>", "now", "</tool_call>")
    data = bytes((GLM_BIT | TOOLS_BIT, 0)) + bytes(map(GLM.index, tags))
    assert check(data).calls == [["now", "{}"]]
    assert case_of(b"\0\0" + bytes([0, 65])).text == DSML[0] + "A"
    assert case_of(b"").text == ""


def test_a_parser_that_depends_on_the_cut_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = OutputParser.feed
    extra = [ContentDelta("!")]
    monkeypatch.setattr(OutputParser, "feed", lambda self, pieces: feed(self, pieces) + extra)
    with pytest.raises(AssertionError, match="another cut"):
        check(b"\0\0" + b"a long enough answer")


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris")
def test_coverage_finds_nothing_in_a_few_runs(tmp_path: Path) -> None:
    words = [
        "-m",
        "tests.server.chat.fuzz_parser",
        "-runs=2500",
        "-seed=1",
        "-max_len=64",
        "-len_control=0",
    ]
    artefacts = f"-artifact_prefix={tmp_path}/"
    # libFuzzer limits the peak of its memory, and Linux hands a peak on through exec: started from
    # here it would count what earlier tests took, forked by a small shell it does not.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, *words, artefacts]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "cov: " in ran.stderr

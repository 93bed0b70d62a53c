"""`moet plan`: the page it writes, what it prints, what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from moet.cli import main, parser, with_dashes
from moet.plan import commands, make_report, raw_config, recipes
from moet.runtime.hardware import GIB, hardware
from moet.runtime.plan_types import PlanSettings

ROOT = Path(__file__).parents[1]


def test_recipes_are_up_to_date() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    assert page == recipes(), "run: moet plan --recipes > docs/recipes.md"


def test_the_readme_tells_what_the_recipes_do() -> None:
    row = r"^\| (\S+?)(?:x(\d))? \| ([\d,]+) \|.*\| ([\d,]+) \| ([\d,]+) \|$"
    rows = re.findall(row, recipes(), re.MULTILINE)
    half = len(rows) // 2
    assert half == 9
    page = (ROOT / "README.md").read_text("utf-8")
    for first, second in zip(rows[:half], rows[half:], strict=True):
        name = first[0].replace("-", " ").upper()
        cards = f"{first[1]} x {name}" if first[1] else name
        cells = [
            f"{window} tokens, {max(plain, drafted, key=lambda n: int(n.replace(',', '')))} tok/s"
            for _, _, window, plain, drafted in (first, second)
        ]
        assert f"| {cards} | {cells[0]} | {cells[1]} |" in page


def test_commands_are_understood_by_the_command_line() -> None:
    for model in ("deepseek-v4-flash", "glm-5.2"):
        given = hardware("rtx-5090", host_bytes=256 * GIB)
        settings = PlanSettings(precision="w2")
        report = make_report(model, given, settings, dense_dtype="fp8" if "glm" in model else None)
        convert, serve = (shlex.split(line) for line in commands(report))
        parser().parse_args(with_dashes(convert[1:]))
        args = parser().parse_args(with_dashes(serve[1:]))
        assert args.max_model_len == report.plan.kv.max_model_len
        pages = report.plan.device_bytes["kv pages"]
        assert args.kv_cache_memory == pages


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "deepseek-v4-flash", "--gpu", "rtx-5090x2", "--ram", "96", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["hardware"] == "rtx-5090x2"
    assert sum(report["plan"]["host_bytes"].values()) == 96 * GIB
    assert [rate["num_spec_tokens"] for rate in report["predicted"]["decode"]] == [0, 2]
    assert report["assumptions"]


def test_a_table_shows_bytes_rates_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "glm-5.2", "--gpu", "h200", "--ram", "200", "--spec-tokens", "0"]) == 0
    shown = capsys.readouterr().out
    for part in ("experts, cache", "kv pages", "predicted prefill", "moet serve", "host memory"):
        assert part in shown


def test_a_folder_is_planned_as_its_config_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = raw_config("glm-5.2", "fp8")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pack.json").write_text(json.dumps({"dense_dtype": "bf16"}))
    words = ["plan", str(tmp_path), "--gpu", "h200x4", "--ram", "64", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dense_dtype"] == "bf16"
    assert len(report["commands"]) == 1


@pytest.mark.bug("S12")
def test_s12_a_server_that_cannot_fit_says_so_before_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", str(tmp_path))
    config, _ = raw_config("deepseek-v4-flash")  # a folder without any weights
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), "demo"):
        words = ["generate", model, "-p", "hello", "--kv-cache-memory", "4000GiB"]
        assert main(words) == 2
        message = capsys.readouterr().err
        for part in ("GiB are available", "window", "Change: "):
            assert part in message
    assert "--kv-cache-memory " in message.partition("Change: ")[2]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "plan needs a MODEL"),
        (["gpt-2"], "gpt-2 is neither a folder"),
        (["demo", "--ram", "0"], "at least 8.3 GiB are needed"),
        (["glm-5.2", "--gpu", "voodoo"], "rtx-pro-6000"),
        (["glm-5.2", "--gpu", "rtx-5090", "--ram", "64"], "--dense-dtype fp8"),
        (["glm-5.2", "--flavour", "int4"], "int4"),
        (["deepseek-v4-flash", "--kv-cache-dtype", "nvfp4"], "nvfp4"),
        (["deepseek-v4-flash", "--max-model-len", "2M"], "positions end at 1048576"),
    ],
)
def test_what_is_wrong_ends_with_code_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert part in capsys.readouterr().err

"""The command line: spellings, exit codes, and every command on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from moet import __version__
from moet.cli import main, num_bytes, num_tokens, parser, with_dashes
from moet.commands import num_spec_tokens
from moet.errors import ConfigError
from moet.runtime.parallel.group import Place

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder that the tests of this module share."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOET_CACHE_DIR", str(folder))
        yield folder


def test_flags_are_taken_with_dashes_and_underscores() -> None:
    words = ["serve", "--max_num_seqs=4", "--served_model_name", "my_model", "--no_overlap"]
    args = parser().parse_args(with_dashes(words))
    assert (args.max_num_seqs, args.served_model_name, args.overlap) == (4, ["my_model"], False)
    assert with_dashes(["--", "--a_b"]) == ["--", "--a_b"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5),
        ("1k", 1000),
        ("2GB", 2 * 10**9),
        ("4GiB", 4 << 30),
        ("1.5MiB", 3 << 19),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert num_bytes(text) == number


@pytest.mark.parametrize(("text", "number"), [("32768", 32768), ("32k", 32000), ("32K", 32768)])
def test_token_counts(text: str, number: int) -> None:
    assert num_tokens(text) == number


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generate", "/nowhere", "-p", "x"], "/nowhere is no folder"),
        (["serve", "/nowhere", "--port", "0"], "/nowhere is no folder"),
        (["serve", "org/model", "--port", "0"], "hf download org/model --local-dir model"),
        (["generate", "--max-num-seqs", "0", "-p", "x"], "--max-num-seqs is 0"),
        (["generate", "--queue-timeout", "nan", "-p", "x"], "--queue-timeout is nan"),
        (["serve", "--shutdown-timeout", "nan"], "--shutdown-timeout is nan"),
        (["serve", "--sse-keep-alive-interval", "0"], "--sse-keep-alive-interval is 0"),
        (["serve", "--port", "99999"], "--port is 99999"),
        (["generate", "-p", "x", "-n", "0"], "-n is 0"),
        (["generate", "-p", "x", "--expert-trace", "/nowhere/x"], "--expert-trace /nowhere/x: No"),
        (["generate", "-p", "x", "--max-num-queued-reqs", "0"], "--max-num-queued-reqs is 0"),
        (["generate", "a", "--model", "b", "-p", "x"], "give one of them"),
        (["serve", "--warp-speed"], "unrecognized arguments: --warp-speed"),
        (["serve", "--tool_call_parser", "x"], "--tool-call-parser: leave it out"),
        (["make-checkpoint", "gpt-2"], "gpt-2"),
        (["make-checkpoint", "deepseek-v4-flash", "--size", "huge"], "huge"),
        (["convert", "/nowhere", "/tmp/pack"], "/nowhere"),
        (["serve", "--api-key-file", "/nowhere"], "--api-key-file"),
        (["serve", "--reasoning-effort", "colossal"], "--reasoning-effort"),
        (["serve", "--default-chat-template-kwargs", '{"x": 1}'], "'x'"),
    ],
)
def test_what_is_wrong_ends_with_code_2_and_says_so(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert "Traceback" not in captured.err


def test_a_cache_folder_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", "/dev/null")
    assert main(["generate", "demo", "-p", "x"]) == 2
    err = capsys.readouterr().err
    assert "the cache folder /dev/null cannot be written: Not a directory; set MOET_CACHE" in err
    assert "Traceback" not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == __version__ + "\n"


def test_a_dry_run_prints_the_official_totals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["make-checkpoint", "deepseek-v4-flash", "--size", "full", "--dry-run"]) == 0
    assert "69,187 tensors, 159,609,485,896 bytes" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_what_only_carries_text_needs_no_torch() -> None:
    code = "import sys, moet.cli, moet.server.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_doctor_reports_without_owner(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["reference"]["rows_independent_of_batch"] is True
    assert report["packages"]["torch"]
    assert str(Path.home()) not in out
    main(["doctor"])
    assert "torch" in capsys.readouterr().out


def test_a_checkpoint_and_its_pack_say_the_same(
    capsys: pytest.CaptureFixture[str], cache: Path, tmp_path: Path
) -> None:
    checkpoint, pack = tmp_path / "checkpoint", tmp_path / "pack"
    made = ["make-checkpoint", "deepseek-v4-flash", "--size", "tiny", "-o", str(checkpoint)]
    assert main(made) == 0
    assert main(["convert", str(checkpoint), str(pack)]) == 0
    err = capsys.readouterr().err
    lines = [json.loads(line) for line in err.splitlines() if "done_bytes" in line]
    assert lines[-1]["done_bytes"] == lines[-1]["total_bytes"]
    answers = []
    for model in (str(pack), str(checkpoint)):
        assert main(["generate", model, "-p", "Hi", "--max-tokens", "4", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["choices"][0]["token_ids"])
    assert len(answers[0]) == 4
    assert answers[0] == answers[1]
    assert main(["convert", str(checkpoint), str(pack), "--scale-rule", "inherit"]) == 2
    assert "scale rule" in capsys.readouterr().err
    assert main(["convert", str(pack), str(tmp_path / "again")]) == 2
    assert "is a pack already" in capsys.readouterr().err
    assert main(["verify", str(pack)]) == 0
    with (pack / "experts.w2").open("r+b") as file:
        file.write(b"\xff\x00\xff")
    assert main(["verify", str(pack)]) == 2
    assert "checksums differ for layers.0.ffn.experts.0 (w2 row)" in capsys.readouterr().err
    (checkpoint / "tokenizer.json").write_text("nonsense")
    for words in (["convert", str(checkpoint), str(tmp_path / "c")], ["generate", str(checkpoint)]):
        assert main([*words, *(["-p", "x"] if words[0] == "generate" else [])]) == 2
        assert "tokenizer.json is not a tokenizer file" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.fixture
def server(cache: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """`moet serve demo` in a process of its own, ready."""
    log = (tmp_path / "log").open("wb+")
    words = [sys.executable, "-m", "moet", "serve", "--port", "0", "--shutdown-timeout", "5"]
    process = subprocess.Popen(words, stderr=log, cwd=ROOT)
    try:
        with httpx.Client(base_url=_url(process, tmp_path / "log"), timeout=60) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.05)
                assert process.poll() is None, (tmp_path / "log").read_text()
            yield process, client
    finally:
        process.kill()
        process.wait()
        log.close()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    while True:
        time.sleep(0.05)
        assert process.poll() is None, log.read_text()
        for line in log.read_text().splitlines():
            if "listening on " in line:
                message: str = json.loads(line)["message"]
                return message.removeprefix("listening on ")


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_serve_ends_with_code_0_on_a_signal_after_its_streams(
    server: tuple[subprocess.Popen[bytes], httpx.Client],
) -> None:
    process, client = server
    children = _children(process)
    body = {"prompt": "Hello", "max_tokens": 30, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(30) == 0
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_rank_that_torchrun_starts_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on a host with rank 0's port, or with one that nobody would answer at."""
    outside = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    for name, value in outside.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("moet.server.run.Service", None)
    ranks: list[int] = []

    def be_rank(config: object, place: Place, local_rank: int) -> None:
        ranks.append(place.rank)
        raise SystemExit(0)

    monkeypatch.setattr("moet.runtime.parallel.start.be_rank", be_rank)
    with pytest.raises(SystemExit):
        main(["serve", "demo", "-tp", "2"])
    assert ranks == [1]


def test_serve_leaves_at_once_on_a_second_signal(
    server: tuple[subprocess.Popen[bytes], httpx.Client],
) -> None:
    process, client = server
    children = _children(process)
    body = {"prompt": "Hello", "max_tokens": 60_000, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        while client.get("/ready").json()["status"] != "draining":
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        *_, error, done = [line for line in lines if line]
        assert "engine_dead" in error
        assert done == "data: [DONE]"
        assert process.wait(30) == 0
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_serve_ends_with_code_1_when_its_engine_is_killed(
    server: tuple[subprocess.Popen[bytes], httpx.Client],
) -> None:
    process, client = server
    engine = next(c for c in _children(process) if "spawn_main" in " ".join(c.cmdline()))
    body = {"prompt": "Hello", "max_tokens": 60_000, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        engine.kill()
        *_, error, done = [line for line in lines if line]
        assert "exit code -9" in error
        assert done == "data: [DONE]"
    assert process.wait(30) == 1


def test_tiers_of_cached_kv_are_given_in_gib_and_by_folder() -> None:
    flags = ["--kv-host-cache", "1.5", "--kv-disk-cache", "/kv,with comma,20"]
    args = parser().parse_args(["serve", *flags])
    assert args.kv_host_cache == 3 << 29
    assert args.kv_disk_cache == ("/kv,with comma", 20 << 30)
    args = parser().parse_args(["serve", "--kv-disk-cache", "kv,512MiB"])
    assert args.kv_disk_cache == ("kv", 512 << 20)
    args = parser().parse_args(["serve"])
    assert (args.kv_host_cache, args.kv_disk_cache) == (0, (None, 0))


@pytest.mark.parametrize("value", ["20", ",20", "kv,many"])
def test_a_disk_without_folder_or_size_is_refused(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--kv-disk-cache", value])
    assert "--kv-disk-cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ([], 0),
        (["--spec-tokens", "3"], 3),
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'], 2),
        (["--speculative_config", '{"num_speculative_tokens": 1}'], 1),
    ],
)
def test_drafts_by_either_spelling(words: list[str], number: int) -> None:
    args = parser().parse_args(with_dashes(["serve", *words]))
    assert num_spec_tokens(args) == number


@pytest.mark.parametrize(
    "words",
    [
        ["--spec-tokens", "1", "--speculative-config", '{"num_speculative_tokens": 1}'],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
        ["--speculative-config", '{"num_speculative_tokens": "2"}'],
        ["--speculative-config", '{"num_speculative_tokens": 2, "model": "x"}'],
        ["--speculative-config", "{}"],
    ],
)
def test_other_kinds_of_drafts_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--spec"):
        num_spec_tokens(parser().parse_args(["serve", *words]))

"""DiskStore: exact bytes or nothing, whatever happened to the files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moet.errors import ConfigError
from moet.runtime.kv_disk import HEADER_BYTES, DiskStore, fingerprint

OWN = fingerprint(["model", "fp8"])
SIZE = 100


def _data(number: int) -> bytes:
    return bytes((number * 7 + i) % 256 for i in range(SIZE))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "deep" / "kv"


def _write(store: DiskStore, name: str, data: bytes) -> bool:
    done: list[bool] = []
    store.write(name, [memoryview(data[:60]), memoryview(data[60:])], lambda: done.append(True))
    store.flush()
    assert done == [True]
    return name in store


def _read(store: DiskStore, name: str, size: int = SIZE) -> bytes | None:
    buffers = [bytearray(size - 30), bytearray(30)]  # cut elsewhere than when it was written
    whole = store.read(name, [memoryview(one) for one in buffers]).result()
    return b"".join(buffers) if whole else None


def _file(folder: Path, name: str) -> Path:
    return folder / OWN / name[:2] / name


def test_objects_come_back_in_the_same_and_the_next_process(folder: Path) -> None:
    store = DiskStore(folder, 10_000, OWN)
    names = [f"{n:02x}ab.page" for n in range(5)]
    for n, name in enumerate(names):
        assert _write(store, name, _data(n))
    for again in (store, DiskStore(folder, 10_000, OWN)):
        assert [_read(again, name) for name in names] == [_data(n) for n in range(5)]
        assert _read(again, "00ff.page") is None
        again.check()
        stats = again.stats()
        assert (stats.num_objects, stats.num_read, stats.num_rejected) == (5, 5, 0)
        again.close()
    assert store.stats().num_bytes == sum(f.stat().st_size for f in folder.rglob("*.page"))
    assert _file(folder, names[0]).stat().st_mode & 0o077 == 0  # nobody else's to read
    assert (folder / OWN).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"",
        lambda data: data[: HEADER_BYTES - 10],
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda data: b"moetkv0\n" + data[8:],
        lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:],
        lambda data: bytes(len(data)),
    ],
)
def test_a_damaged_object_is_not_there(folder: Path, harm: object) -> None:
    store = DiskStore(folder, 10_000, OWN)
    _write(store, "aa.page", _data(1))
    _write(store, "ab.page", _data(2))
    path = _file(folder, "aa.page")
    path.write_bytes(harm(path.read_bytes()))  # type: ignore[operator]
    store = DiskStore(folder, 10_000, OWN)
    assert _read(store, "aa.page") is None
    assert "aa.page" not in store
    assert not path.exists()
    assert _read(store, "ab.page") == _data(2)
    assert store.stats().num_rejected == 1
    assert _write(store, "aa.page", _data(1))
    assert _read(store, "aa.page") == _data(1)
    store.check()


def test_a_file_under_another_name_is_not_taken(folder: Path) -> None:
    store = DiskStore(folder, 10_000, OWN)
    _write(store, "aa.page", _data(1))
    _file(folder, "ab.page").parent.mkdir(exist_ok=True)
    _file(folder, "aa.page").rename(_file(folder, "ab.page"))
    assert _read(store, "aa.page") is None  # gone, which is no error
    assert _read(DiskStore(folder, 10_000, OWN), "ab.page") is None
    assert store.stats().num_errors == store.stats().num_rejected == 0


def test_another_fingerprint_finds_nothing_and_yields_first(folder: Path) -> None:
    _write(DiskStore(folder, 10_000, OWN), "aa.page", _data(1))
    other = DiskStore(folder, 3 * (SIZE + HEADER_BYTES), fingerprint(["model", "bf16"]))
    assert "aa.page" not in other
    assert other.stats().num_foreign == 1
    for n in range(3):
        _write(other, f"b{n}.page", _data(n))
    stats = other.stats()
    assert (stats.num_foreign, stats.num_objects, stats.num_evicted) == (0, 3, 1)
    assert not _file(folder, "aa.page").exists()


def test_the_least_recently_used_goes_and_a_chain_ends_first(folder: Path) -> None:
    store = DiskStore(folder, 4 * (SIZE + HEADER_BYTES), OWN)
    chain = [f"c{n}.page" for n in range(4)]
    for n, name in enumerate(chain):
        _write(store, name, _data(n))
    store.touch(chain)
    _write(store, "d0.page", _data(9))
    assert [name in store for name in chain] == [True, True, True, False]
    store.touch(chain[2:])
    store.touch(["d0.page"])
    store.flush()
    again = DiskStore(folder, 4 * (SIZE + HEADER_BYTES), OWN)  # the order survives
    _write(again, "e0.page", _data(8))
    _write(again, "e1.page", _data(8))
    assert [name in again for name in [*chain, "d0.page"]] == [False, False, True, False, True]
    assert not _write(again, "f0.page", bytes(5000))  # larger than the budget: nothing else goes
    assert "d0.page" in again
    again.check()


def test_deleting_and_clearing(folder: Path) -> None:
    store = DiskStore(folder, 10_000, OWN)
    for n in range(4):
        store.write(f"c{n}.page", [memoryview(_data(n))], lambda: None)
    store.delete(["c1.page", "never.page"])
    store.flush()
    assert [f"c{n}.page" in store for n in range(4)] == [True, False, True, True]
    store.clear()
    store.flush()
    assert store.stats().num_objects == store.stats().num_bytes == 0
    assert not list(folder.rglob("*.page"))


def test_leftovers_of_a_crash_go_and_those_being_written_stay(folder: Path) -> None:
    _write(DiskStore(folder, 10_000, OWN), "aa.page", _data(1))
    old, new = _file(folder, "aa.page.1.tmp"), _file(folder, "aa.page.2.tmp")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    store = DiskStore(folder, 10_000, OWN)
    assert (old.exists(), new.exists(), store.stats().num_objects) == (False, True, 1)


def test_a_full_disk_is_counted_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(folder, 10_000, OWN)
    _write(store, "aa.page", _data(1))

    def full(self: Path, target: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert not _write(store, "ab.page", _data(2))
    monkeypatch.undo()
    assert store.stats().num_errors == 1
    assert not list(folder.rglob("*.tmp"))
    assert _read(store, "aa.page") == _data(1)
    store.check()


def test_a_folder_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-disk-cache .*file"):
        DiskStore(tmp_path / "file" / "kv", 1000, OWN)

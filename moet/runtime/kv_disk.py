"""KV objects on disk: one checksummed file each, least recently used first to go.

Knows names, bytes and a budget; what is in them is others' affair. FOLDER/<fingerprint>/<xx>/<name>
holds the objects of one way to compute them; those of other fingerprints only count for the budget.
A file appears complete or not at all (renamed into place), and its checksum is tested when it is
read, so no crash, full disk or foreign file can put wrong bytes into an answer. The order of use
survives in the files' times. Servers may share a folder: each tolerates what others delete.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from moet.errors import ConfigError

logger = logging.getLogger(__name__)

MAGIC = b"moetkv1\n"
DIGEST_BYTES = 16
HEADER_BYTES = 64
NUM_READERS = 4
STALE_S = 600.0  # after which an unfinished file has no writer any more

Buffers = Sequence[memoryview]


def fingerprint(parts: Iterable[str]) -> str:
    """A folder name for objects that only agree if all parts do."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class DiskStats:
    """num_foreign: files of other fingerprints. num_rejected: files with wrong content."""

    num_objects: int = 0
    num_foreign: int = 0
    num_bytes: int = 0
    num_written: int = 0
    num_read: int = 0
    num_evicted: int = 0
    num_rejected: int = 0
    num_errors: int = 0


class DiskStore:
    """Objects by name, read on a few threads and written on one. Any thread may call.

    Raises ConfigError if the folder cannot be made or read.
    """

    def __init__(self, folder: Path, budget_bytes: int, fingerprint: str) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self._own = fingerprint
        self._lock = threading.Lock()  # of everything below
        self._files: OrderedDict[str, int] = OrderedDict()  # path in folder -> bytes, oldest first
        self._num_foreign = 0
        self._num_deletes: Counter[str] = Counter()  # by name, asked for and not done
        self._stats = DiskStats()
        try:
            (folder / fingerprint).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._scan()
        except OSError as error:
            raise ConfigError(f"--kv-disk-cache {folder}: {error.strerror}") from None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="moet-kv-write")
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="moet-kv-read")
        self._writer.submit(self._evict, 0)
        stats = self.stats()
        logger.info(
            "kv_disk folder=%s objects=%d foreign=%d bytes=%.2fGiB budget=%.2fGiB", folder,
            stats.num_objects, stats.num_foreign, stats.num_bytes / 2**30, budget_bytes / 2**30,
        )  # fmt: skip

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return self._path(name) in self._files and not self._num_deletes[name]

    def write(self, name: str, data: Buffers, done: Callable[[], None]) -> None:
        """Write an object in the background; the buffers must not change until `done` is called.

        A failure is counted and otherwise means that the object is not there.
        """
        self._writer.submit(self._write, name, data, done)

    def read(self, name: str, into: Buffers) -> Future[bool]:
        """Read an object that fills the buffers; False if it is not (or no longer) there, whole."""
        return self._readers.submit(self._read, name, into)

    def touch(self, names: Sequence[str]) -> None:
        """Count these as just used, the first one last: a chain's tail goes before its head."""
        self._writer.submit(self._touch, list(names))

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, after the writes that were asked for before; nobody finds them now."""
        with self._lock:
            self._num_deletes.update(names)
        self._writer.submit(self._delete, list(names))

    def clear(self) -> None:
        """Remove every object of this fingerprint."""
        with self._lock:
            names = [place[len(self._own) + 4 :] for place in self._files if self._is_own(place)]
        self.delete(names)

    def flush(self) -> None:
        """Wait for everything that was asked of the writer so far."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what is being written and read."""
        self._writer.shutdown()
        self._readers.shutdown()

    def stats(self) -> DiskStats:
        """The books at one moment."""
        with self._lock:
            num_own = len(self._files) - self._num_foreign
            return replace(self._stats, num_objects=num_own, num_foreign=self._num_foreign)

    def check(self) -> None:
        """Raise AssertionError if the sum of the files and the books differ."""
        with self._lock:
            assert self._stats.num_bytes == sum(self._files.values())
            foreign = [place for place in self._files if not self._is_own(place)]
            assert self._num_foreign == len(foreign)

    def _path(self, name: str) -> str:
        return f"{self._own}/{name[:2]}/{name}"

    def _scan(self) -> None:
        found = []
        for path in self.folder.glob("*/*/*"):
            try:
                status = path.stat()
                if path.suffix == ".tmp":
                    if status.st_mtime < time.time() - STALE_S:
                        path.unlink()
                else:
                    place = path.relative_to(self.folder).as_posix()
                    found.append((status.st_mtime_ns, place, status.st_size))
            except FileNotFoundError:  # another server's
                continue
        for _, place, size in sorted(found):
            self._files[place] = size
            self._num_foreign += not self._is_own(place)
        self._stats = DiskStats(num_bytes=sum(self._files.values()))

    def _count(self, **changes: int) -> None:
        values = {name: getattr(self._stats, name) + change for name, change in changes.items()}
        self._stats = replace(self._stats, **values)

    def _write(self, name: str, data: Buffers, done: Callable[[], None]) -> None:
        try:
            size = HEADER_BYTES + sum(len(part) for part in data)
            if name not in self and size <= self.budget_bytes:
                self._evict(size)
                self._put(self._path(name), name, data)
                with self._lock:
                    old = self._files.get(self._path(name), 0)
                    self._files[self._path(name)] = size
                    self._count(num_bytes=size - old, num_written=1)
        except OSError as error:
            with self._lock:
                first = self._stats.num_errors == 0
                self._count(num_errors=1)
            if first:
                logger.warning("KV cannot be kept in %s: %s", self.folder, error)
        finally:
            done()

    def _put(self, place: str, name: str, data: Buffers) -> None:
        path = self.folder / place
        path.parent.mkdir(exist_ok=True, mode=0o700)
        unfinished = path.with_name(f"{name}.{os.getpid()}.tmp")
        try:
            with open(unfinished, "wb", opener=_private) as file:
                file.write(self._header(name, data))
                for part in data:
                    file.write(part)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _header(self, name: str, data: Buffers) -> bytes:
        digest = hashlib.blake2b(f"{self._own}/{name}".encode(), digest_size=DIGEST_BYTES)
        size = 0
        for part in data:
            digest.update(part)
            size += len(part)
        header = MAGIC + bytes.fromhex(self._own) + digest.digest() + size.to_bytes(8, "little")
        return header.ljust(HEADER_BYTES, b"\0")

    def _read(self, name: str, into: Buffers) -> bool:
        path = self.folder / self._path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(HEADER_BYTES)
                sizes = [file.readinto(part) for part in into]
                whole = not file.read(1) and sizes == [len(part) for part in into]
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)  # another server's doing
            with self._lock:
                self._forget(self._path(name))
                self._count(num_errors=not gone)
            return False
        if whole and header == self._header(name, into):
            with self._lock:
                self._count(num_read=1)
            return True
        logger.warning("%s is damaged; it is not used", path)
        self._remove(self._path(name))
        with self._lock:
            self._count(num_rejected=1)
        return False

    def _evict(self, num_bytes: int) -> None:
        """Make room for num_bytes more."""
        while True:
            with self._lock:
                if self._stats.num_bytes + num_bytes <= self.budget_bytes or not self._files:
                    return
                oldest = next(iter(self._files))
                self._count(num_evicted=1)
            self._remove(oldest)

    def _remove(self, place: str) -> None:
        with self._lock:
            self._forget(place)
        try:
            (self.folder / place).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot delete %s: %s", self.folder / place, error)

    def _delete(self, names: list[str]) -> None:
        for name in names:
            self._remove(self._path(name))
            with self._lock:
                self._num_deletes[name] -= 1
                if not self._num_deletes[name]:
                    del self._num_deletes[name]

    def _forget(self, place: str) -> None:
        if place in self._files:
            self._count(num_bytes=-self._files.pop(place))
            self._num_foreign -= not self._is_own(place)

    def _touch(self, names: list[str]) -> None:
        now = itertools.count(time.time_ns() - len(names))
        for name in reversed(names):
            place = self._path(name)
            with self._lock:
                if place not in self._files:
                    continue
                self._files.move_to_end(place)
            stamp = next(now)
            try:
                os.utime(self.folder / place, ns=(stamp, stamp))
            except OSError:  # it may be gone; reading it will tell
                continue

    def _is_own(self, place: str) -> bool:
        return place.startswith(self._own)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)

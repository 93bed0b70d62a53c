"""Batches as bytes, for ranks that carry out what rank 0 has scheduled, and digests of results.

Plain values only: whatever arrives, nothing but batches comes out. A sequence travels when it is
admitted, without what only rank 0 asks of it, and is named by its arrival otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor

from moet.runtime.batch import Admit, Batch, Command, Release, Row, StepResult
from moet.runtime.sampler import Proposal
from moet.runtime.sequence import Sequence, Status
from moet.types import Request

_KINDS: Mapping[str, Any] = {
    kind.__name__: kind for kind in (Batch, Row, Proposal, *get_args(Command))
}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.int32, torch.int64, torch.bool)}


class StepWriter:
    """Makes bytes of batches, for `StepReader`. Knows who has which slot, since a command to let go
    of one does not say whether that sequence is finished or will come back."""

    def __init__(self) -> None:
        self._placed: dict[int, Sequence] = {}  # by slot
        self._away: dict[int, Sequence] = {}  # that had a slot and may come back, by arrival

    def write(self, batch: Batch) -> bytes:
        """A batch, and who has finished. Grammars stay behind: rows bring masks made of them."""
        self._follow(batch.commands)
        finished = [n for n, seq in self._away.items() if seq.status is Status.FINISHED]
        for arrival in finished:
            del self._away[arrival]
        return msgspec.msgpack.encode([_plain(batch), finished])

    def _follow(self, commands: Iterable[Command]) -> None:
        """Take note of who leaves a slot and who gets one, in order."""
        for command in commands:
            match command:
                case Admit(seq, slot):
                    self._placed[slot] = seq
                    self._away.pop(seq.arrival, None)
                case Release(slot) if slot in self._placed:
                    seq = self._placed.pop(slot)
                    self._away[seq.arrival] = seq


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case list() | tuple():
            return [_plain(each) for each in value]
        case Tensor():
            data = value.contiguous().cpu()
            return {"t": [str(data.dtype), list(data.shape), data.numpy().tobytes()]}
        case Sequence():
            return {"s": value.arrival}
        case Admit(seq, slot, num_tokens):
            asked = seq.request
            request = Request(
                request_id="",  # texts may be of any kind, and ranks need none of them
                prompt_token_ids=asked.prompt_token_ids,
                params=asked.params,
                eos_token_ids=asked.eos_token_ids,
            )
            output = seq.token_ids[seq.prompt_len : num_tokens]
            numbers = [seq.arrival, seq.seed, seq.num_spec_tokens]
            body = [msgspec.msgpack.encode(request), output, *numbers]
            return {"a": [body, slot, num_tokens]}
        case _:
            name = type(value).__name__
            assert name in _KINDS, f"a batch holds a {name}"
            made = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init}
            return {"d": [name, made]}


class StepReader:
    """Makes batches of bytes. A sequence is the same object from its first Admit until it has
    finished, so that what befalls it here stays with it, as it does on rank 0."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}  # by arrival
        self._passing: dict[int, Sequence] = {}  # of a divided pass, whose rows may outlive them
        self._requests = msgspec.msgpack.Decoder(Request)

    def read(self, data: bytes) -> Batch:
        """The batch that was written, but for what only its scheduler needs."""
        plain, finished = msgspec.msgpack.decode(data)
        batch = self._made(plain)
        assert isinstance(batch, Batch)
        if batch.begins:
            self._passing = {row.seq.arrival: row.seq for row in batch.begins}
        if batch.ends_pass:
            self._passing = {}
        for arrival in finished:
            self._sequences.pop(arrival).status = Status.FINISHED
        return batch

    def _made(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._made(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((tag, body),) = value.items()
        match tag:
            case "t":
                dtype, shape, data = body
                flat = torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype])
                return flat.view(shape)
            case "s":
                return self._sequences.get(body) or self._passing[body]
            case "a":
                return self._admitted(*body)
        name, made = body
        values = {key: self._made(each) for key, each in made.items()}
        if name == "Row":
            values["proposals"] = tuple(values["proposals"])
        return _KINDS[name](**values)

    def _admitted(self, body: list[Any], slot: int, num_tokens: int) -> Admit:
        packed, output, arrival, seed, num_spec_tokens = body
        request = self._requests.decode(packed)
        token_ids = [*request.prompt_token_ids, *output]
        seq = self._sequences.get(arrival)
        if seq is None:
            seq = Sequence(
                request=request,
                arrival=arrival,
                seed=seed,
                max_len=0,
                root=b"",
                stop_ids=frozenset(),
                token_ids=token_ids,
                num_spec_tokens=num_spec_tokens,
            )
            self._sequences[arrival] = seq
        seq.token_ids = token_ids
        return Admit(seq, slot, num_tokens)


def digest(result: StepResult) -> bytes:
    """16 bytes of what ranks must agree on: tokens, drafts, and which rows failed."""
    drafts = {i: [p.token_id for p in made] for i, made in result.proposals.items()}
    said = repr(
        (
            sorted((i, [int(t) for t in made]) for i, made in result.tokens.items()),
            sorted((i, [int(t) for t in made]) for i, made in drafts.items()),
            sorted(result.errors),
        )
    )
    return hashlib.blake2b(said.encode(), digest_size=16).digest()

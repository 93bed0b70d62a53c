"""Batches as bytes, for ranks that carry out what rank 0 has scheduled, and digests of results.

Plain values only: whatever arrives, nothing but batches comes out. A sequence travels whole when it
is admitted, and by its request's id afterwards.
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
from moet.types import Request, SamplingParams

_KINDS: Mapping[str, Any] = {
    kind.__name__: kind for kind in (Batch, Row, Proposal, *get_args(Command))
}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.int32, torch.int64, torch.bool)}


class StepWriter:
    """Makes bytes of batches, for `StepReader`. Knows who has which slot, since a command to let go
    of one does not say whether that sequence is finished or will come back."""

    def __init__(self) -> None:
        self._owners = _Owners()

    def write(self, batch: Batch) -> bytes:
        """A batch, and who has finished. Grammars stay behind: rows bring masks made of them."""
        self._owners.follow(batch.commands)
        return msgspec.msgpack.encode([_plain(batch), self._owners.take_finished()])


class _Owners:
    """Sequences that have a slot, and those that had one and may come back, by their arrival."""

    def __init__(self) -> None:
        self._placed: dict[int, Sequence] = {}  # by slot
        self._away: dict[int, Sequence] = {}

    def follow(self, commands: Iterable[Command]) -> list[Sequence]:
        """Take note of who leaves a slot and who gets one, in order; returns who left."""
        left = []
        for command in commands:
            match command:
                case Admit(seq, slot):
                    self._placed[slot] = seq
                    self._away.pop(seq.arrival, None)
                case Release(slot) if slot in self._placed:
                    seq = self._placed.pop(slot)
                    self._away[seq.arrival] = seq
                    left.append(seq)
        return left

    def take_finished(self) -> list[int]:
        """The arrivals of those without a slot that have finished; they are forgotten."""
        finished = [n for n, seq in self._away.items() if seq.status is Status.FINISHED]
        for arrival in finished:
            del self._away[arrival]
        return finished

    def finish(self, arrivals: Iterable[int]) -> None:
        """Those that another rank has taken are finished."""
        for arrival in arrivals:
            self._away.pop(arrival).status = Status.FINISHED


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
            return {"s": [value.request.request_id, value.num_spec_tokens]}
        case Admit(seq, slot, num_tokens):
            request = msgspec.structs.replace(seq.request, grammar=None)
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
    """Makes batches of bytes, with sequences that live as long as they have a slot."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._owners = _Owners()
        self._requests = msgspec.msgpack.Decoder(Request)

    def read(self, data: bytes) -> Batch:
        """The batch that was written, but for what only its scheduler needs."""
        plain, finished = msgspec.msgpack.decode(data)
        batch = self._made(plain)
        assert isinstance(batch, Batch)
        for seq in self._owners.follow(batch.commands):
            request_id = seq.request.request_id
            if self._sequences.get(request_id) is seq:  # not one that came back in this batch
                del self._sequences[request_id]
        self._owners.finish(finished)
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
                return self._sequence(*body)
            case "a":
                return self._admitted(*body)
        name, made = body
        values = {key: self._made(each) for key, each in made.items()}
        if name == "Row":
            values["proposals"] = tuple(values["proposals"])
        return _KINDS[name](**values)

    def _sequence(self, request_id: str, num_spec_tokens: int) -> Sequence:
        """One that is known, or a place for the fault of a command that comes before Admit."""
        seq = self._sequences.get(request_id)
        if seq is None:
            nothing = Request(request_id=request_id, prompt_token_ids=[], params=SamplingParams())
            seq = _sequence(nothing, [], 0, 0)
        seq.num_spec_tokens = num_spec_tokens
        return seq

    def _admitted(self, body: list[Any], slot: int, num_tokens: int) -> Admit:
        packed, output, arrival, seed, num_spec_tokens = body
        request = self._requests.decode(packed)
        seq = _sequence(request, output, arrival, seed)
        seq.num_spec_tokens = num_spec_tokens
        self._sequences[request.request_id] = seq
        return Admit(seq, slot, num_tokens)


def _sequence(request: Request, output: list[int], arrival: int, seed: int) -> Sequence:
    return Sequence(
        request=request,
        arrival=arrival,
        seed=seed,
        max_len=0,
        root=b"",
        stop_ids=frozenset(),
        token_ids=[*request.prompt_token_ids, *output],
    )


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

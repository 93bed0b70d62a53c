"""KVCache: bytes survive the way to the host and back, into other pages and slots."""

import pytest
import torch

from moet.errors import ConfigError
from moet.models.base import KVCacheSpec, KVGroup
from moet.runtime.kv_cache import KVCache, resume_bytes

SPEC = KVCacheSpec(
    4,
    (
        KVGroup("a", "paged", (0, 1, 2), 4, 12),
        KVGroup("b", "paged", (5,), 1, 3),
        KVGroup("window", "ring", (0, 1), 8, 40, resume=True),
        KVGroup("pending", "ring", (3,), 4, 25),
    ),
)


def _cache(spec: KVCacheSpec = SPEC, *, filled: bool = True) -> KVCache:
    kv = KVCache(spec, num_pages=6, num_seq_slots=3, num_host_blocks=8, num_snapshots=2)
    if filled:
        for i, tensor in enumerate(kv.tensors.values()):
            generator = torch.Generator().manual_seed(i)
            tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator))
    return kv


def test_shapes_follow_the_spec() -> None:
    kv = _cache()
    shapes = {name: tuple(tensor.shape) for name, tensor in kv.tensors.items()}
    assert shapes == {
        "a": (3, 6, 12),
        "b": (1, 6, 3),
        "window": (2, 3, 40),
        "pending": (1, 3, 25),
    }
    assert all(tensor.dtype == torch.uint8 for tensor in kv.tensors.values())
    assert (kv.block_bytes, kv.ring_blocks, resume_bytes(SPEC)) == (39, 3, 80)


def test_pages_return_to_other_pages() -> None:
    kv = _cache()
    before = {name: kv.tensors[name][:, [4, 1, 5]].clone() for name in "ab"}
    untouched = {name: kv.tensors[name][:, [4, 5]].clone() for name in "ab"}
    kv.pages_to_host([4, 1, 5], [7, 0, 3])
    kv.pages_from_host([0, 2, 3], [7, 0, 3])
    for name in "ab":
        assert torch.equal(kv.tensors[name][:, [0, 2, 3]], before[name])
        assert torch.equal(kv.tensors[name][:, [4, 5]], untouched[name])


def test_rings_return_to_another_slot() -> None:
    kv = _cache()
    before = {name: kv.tensors[name].clone() for name in ("window", "pending")}
    kv.rings_to_host(0, [6, 2, 5])
    kv.rings_from_host(2, [6, 2, 5])
    for name, tensor in before.items():
        assert torch.equal(kv.tensors[name][:, 2], tensor[:, 0])
        assert torch.equal(kv.tensors[name][:, :2], tensor[:, :2])


def test_snapshots_hold_the_resumable_rings_only() -> None:
    kv = _cache()
    before = {name: kv.tensors[name].clone() for name in ("window", "pending")}
    kv.save_snapshot(1, 0)
    kv.tensors["window"].zero_()
    kv.restore_snapshot(2, 0)
    assert torch.equal(kv.tensors["window"][:, 2], before["window"][:, 1])
    assert not kv.tensors["window"][:, :2].any()
    assert torch.equal(kv.tensors["pending"], before["pending"])


def test_models_without_rings_need_no_blocks_for_them() -> None:
    kv = _cache(KVCacheSpec(4, SPEC.groups[:2]))
    assert (kv.ring_blocks, resume_bytes(kv.spec)) == (0, 0)
    kv.rings_to_host(0, [])
    kv.rings_from_host(0, [])
    kv.pages_to_host([], [])
    kv.pages_from_host([], [])


def test_a_model_must_have_pages() -> None:
    with pytest.raises(ConfigError, match="no paged state"):
        _cache(KVCacheSpec(4, SPEC.groups[2:]))

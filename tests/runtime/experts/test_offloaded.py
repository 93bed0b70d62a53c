"""One layer's mixture with its experts elsewhere equals the resident one, for every row format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet.kernels.moe import expert_mixture
from moet.models.base import ExpertProvider
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.expert_encoder import Tier
from moet.models.pack import Pack
from moet.models.synthetic import write_checkpoint
from moet.runtime.experts.build import open_store
from moet.runtime.experts.sizes import tier_sizes
from moet.runtime.experts.store import ResidentExpertStore


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("offloaded")
    write_checkpoint(folder / "checkpoint", size="tiny", model="glm-5.2", flavour="nvfp4")
    options = ConvertOptions(num_workers=1)
    return convert(Checkpoint.open(folder / "checkpoint"), folder / "pack", options)


def mixture(pack: Pack, provider: ExpertProvider, x: Tensor, ids: Tensor, layer: int) -> Tensor:
    weights = torch.linspace(0.1, 1.0, ids.numel()).view(ids.shape)
    table = provider.resolve(layer, ids)
    return expert_mixture.reference(
        x, ids, weights, table, limit=10.0, round_activations=True, weigh_output=True
    )


@pytest.mark.bug("S09")
@pytest.mark.parametrize("tier", ["fp4", "w2"])
@pytest.mark.parametrize("num_rows", [1, 5], ids=["through the pool", "through staging"])
def test_offloaded_equals_resident(nvfp4: Pack, tier: Tier, num_rows: int) -> None:
    form, experts = nvfp4.format(tier), nvfp4.experts
    assert (form.name == "nvfp4") == (tier == "fp4")
    sizes = tier_sizes(
        row_bytes=form.row_bytes,
        num_rows=experts.num_rows,
        top_k=4,
        pool_bytes=4 * form.row_bytes,
        host_bytes=5 * form.row_bytes,
    )
    store = open_store(nvfp4, tier, sizes, scan_from_rows=4)
    resident = ResidentExpertStore(nvfp4, tier)
    generator = torch.Generator().manual_seed(4)
    for layer in (*experts.layers[:3], experts.layers[0]):
        x = torch.randn(num_rows, experts.hidden_size, generator=generator).bfloat16()
        ids = torch.stack(
            [torch.randperm(experts.num_experts, generator=generator)[:4] for _ in range(num_rows)]
        )
        expected = mixture(nvfp4, resident, x, ids, layer)
        assert torch.equal(mixture(nvfp4, store, x, ids, layer), expected)
    stats = store.stats()
    assert stats.num_disk_reads > 0
    assert (stats.total("num_streamed") > 0) == (num_rows > 4)
    store.check()
    store.close()

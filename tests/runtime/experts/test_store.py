import pytest
import torch

from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.expert_encoder import Tier
from moet.models.pack import Pack
from moet.models.synthetic import write_checkpoint
from moet.runtime.experts.store import ResidentExpertStore


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("store")
    write_checkpoint(folder / "checkpoint", size="tiny")
    options = ConvertOptions(num_workers=1)
    return convert(Checkpoint.open(folder / "checkpoint"), folder / "pack", options)


@pytest.mark.parametrize("tier", ["w2", "fp4"])
def test_every_expert_is_where_its_table_says(pack: Pack, tier: Tier) -> None:
    store = ResidentExpertStore(pack, tier)
    store.check()
    for layer_idx in pack.experts.layers:
        table = store.resolve(layer_idx, torch.tensor([[0, 15]]))
        assert table.format is pack.format(tier)
        for expert_id in range(pack.experts.num_experts):
            row = table.rows[table.slot_of[expert_id]]
            expected = pack.expert_row(tier, layer_idx, expert_id)
            assert torch.equal(row, expected)


def test_loading_reports_its_progress(pack: Pack) -> None:
    done: list[int] = []
    store = ResidentExpertStore(pack, "w2", lambda progress: done.append(progress.done_bytes))
    assert done[-1] == store.rows.numel()
    assert len(done) == len(pack.experts.layers)

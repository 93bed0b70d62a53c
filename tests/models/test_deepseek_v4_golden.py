"""DeepSeek-V4-Flash against golden numbers of an independent fp32 implementation."""

import pytest
import torch
from torch import Tensor

from moet.models.base import ModelOutput
from tests.models.hash_weights import (
    GOLDEN,
    GOLDEN_IDS,
    DictSource,
    Piece,
    Rig,
    forward_input,
    hash_source,
    load_rig,
)

MAIN = {
    0: ([-0.2520, -0.9609, 0.0364, -1.3528], 191),
    3: ([-0.3392, -1.4729, 0.9520, 0.9767], 24),
    7: ([1.0235, 0.8797, 0.0836, -0.6600], 116),
    8: ([-3.4043, -0.9386, 0.2603, -0.4698], 73),
    31: ([0.4755, -0.8057, 1.5928, -0.5935], 29),
    127: ([0.2566, 0.6604, -0.7500, 1.1490], 5),
    128: ([0.0701, 1.0298, 0.5113, -0.2195], 229),
    255: ([-1.7407, 0.1200, -0.5871, -1.5886], 166),
    299: ([0.1578, 1.6533, -1.2506, -1.6395], 230),
}
MTP = {
    0: ([-2.8336, 1.6285, 1.0365, 0.6377], 167),
    7: ([-0.6120, 1.2403, 0.5636, 0.8319], 220),
    128: ([-1.5643, 0.2465, -1.0677, 2.9023], 87),
    298: ([1.5382, -1.2142, 0.4009, 1.0336], 30),
}
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def source() -> DictSource:
    return hash_source(GOLDEN)


@pytest.fixture(scope="module")
def rig(source: DictSource) -> Rig:
    return load_rig(GOLDEN, source, num_spec_tokens=2)


@pytest.fixture(scope="module")
def output(rig: Rig) -> ModelOutput:
    return rig.model.forward(forward_input([Piece(GOLDEN_IDS, 0)]), rig.kv, rig.experts)


@pytest.fixture(scope="module")
def drafted(rig: Rig, output: ModelOutput) -> Tensor:
    """The draft block over all positions whose next token is known, in two chunks."""
    logits = []
    for start, end in ((0, 13), (13, 299)):
        inputs = forward_input([Piece(GOLDEN_IDS[start + 1 : end + 1], start)])
        streams = output.hidden_states[start:end]
        logits.append(rig.model.draft(inputs, streams, rig.kv, rig.experts).logits)
    return torch.cat(logits)


def check(logits: Tensor, values: list[float], best: int) -> None:
    torch.testing.assert_close(logits[:4], torch.tensor(values), atol=TOLERANCE, rtol=0)
    assert int(logits.argmax()) == best


def test_hash_weights_are_the_documented_ones(source: DictSource) -> None:
    spots = {
        "embed.weight": [-0.137957, 0.0937364, -0.124838, 0.0162700],
        "layers.2.attn.compressor.ape": [0.198428, 1.351723, -1.299451],
        "layers.0.hc_attn_scale": [1.180406, 0.716267, 0.542808],
    }
    for name, values in spots.items():
        got = source.load(name).flatten()[: len(values)]
        torch.testing.assert_close(got, torch.tensor(values), atol=1e-6, rtol=0)


@pytest.mark.parametrize("position", MAIN)
def test_logits(output: ModelOutput, position: int) -> None:
    check(output.logits[position], *MAIN[position])


@pytest.mark.parametrize("position", MTP)
def test_draft_logits(drafted: Tensor, position: int) -> None:
    check(drafted[position], *MTP[position])

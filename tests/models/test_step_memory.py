"""What the plan reserves for a chunk, against what one took on an H200."""

import pytest

from moet.models.footprint import footprint
from moet.models.synthetic_glm import MODEL_NAME as GLM
from moet.runtime.dummy import preset_config

TOKENS = 8192


@pytest.mark.parametrize(("ranks", "measured"), [(1, 214_194), (2, 201_522)])  # bytes a token
def test_a_chunk_of_glm_takes_what_was_measured(ranks: int, measured: int) -> None:
    """bench.step_glm --parts chunk, also of one rank's share, its logits included."""
    model = footprint(preset_config(GLM, "full", flavour="fp8"), kv_dtype="nvfp4")
    planned = model.step_bytes(TOKENS, ranks)
    assert planned == pytest.approx(measured * TOKENS, rel=0.01)
    assert model.step_bytes(TOKENS // 2, ranks) < 0.6 * planned

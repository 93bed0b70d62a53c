"""Every kind of state after any history of drafts, moves and resumes is what the tokens that hold
make when they are computed at once: rings, compressor state, index keys, draft rows; penalties,
thinking budgets and grammars."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.runtime.grammar import Constraint
from moet.runtime.sampler import SamplerState
from moet.types import SamplingParams, ThinkingBudget
from tests.fakes import FakeModel, make_core, request
from tests.models.glm_configs import tiny
from tests.models.glm_rig import load_model, random_source, resident
from tests.models.hash_weights import (
    GOLDEN,
    GOLDEN_IDS,
    Piece,
    Rig,
    dirty_kv,
    forward_input,
    hash_source,
    load_rig,
)

MAX_DRAFTS = 3
NUM_PAGES, NUM_SLOTS = 14, 3
STARTS = (1, 3, 61, 120, 126, 190, 251, 254)  # shortly before windows close and pages end
GLM = GlmMoeDsaConfig.from_dict(
    tiny(vocab_size=257, num_hidden_layers=3, num_nextn_predict_layers=1)
)
QUICK = settings(
    max_examples=6,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@cache
def _rig(kind: str) -> Rig:
    if kind == "glm":
        source = random_source(GLM, "fp8")
        model = load_model(GLM, source, "deployed", "nvfp4", MAX_DRAFTS)
        return Rig(model, resident(GLM, source), {})  # type: ignore[arg-type]
    config = replace(GOLDEN, num_hidden_layers=3, num_hash_layers=1, compress_ratios=(4, 128, 4, 0))
    return load_rig(config, hash_source(config), num_spec_tokens=MAX_DRAFTS)


def _next_ids(start: int, end: int, page_size: int) -> list[int]:
    """What draft rows start..end-1 join: their own token before a page border."""
    return [
        GOLDEN_IDS[p] if (p + 1) % page_size == 0 else GOLDEN_IDS[p + 1] for p in range(start, end)
    ]


@cache
def _one_shot(kind: str) -> tuple[Tensor, Tensor]:
    """Logits of the model and of its draft block, all rows at once."""
    rig, count = _rig(kind), len(GOLDEN_IDS) - 1
    page_size = rig.model.kv_cache_spec().page_size
    kv = dirty_kv(rig.model, NUM_PAGES, NUM_SLOTS)
    pages = tuple(range(-(-count // page_size)))
    output = rig.model.forward(
        forward_input([Piece(GOLDEN_IDS[:count], 0, 0, pages)]), kv, rig.experts
    )
    drafted = rig.model.draft(
        forward_input([Piece(_next_ids(0, count, page_size), 0, 0, pages)]),
        output.hidden_states,
        kv,
        rig.experts,
    )
    return output.logits, drafted.logits


class ModelMachine(RuleBasedStateMachine):
    """One sequence that always turns out to be GOLDEN_IDS, whatever is drafted in between."""

    kind = "v4"

    @initialize(start=st.sampled_from(STARTS))
    def begin(self, start: int) -> None:
        self.rig = _rig(self.kind)
        self.logits, self.drafted = _one_shot(self.kind)
        spec = self.rig.model.kv_cache_spec()
        self.page_size = spec.page_size
        self.rings = [group for group in spec.groups if group.kind == "ring"]
        self.paged = [group for group in spec.groups if group.kind == "paged"]
        self.kv = dirty_kv(self.rig.model, NUM_PAGES, NUM_SLOTS)
        num_pages = -(-len(GOLDEN_IDS) // self.page_size)
        self.slot, self.pages = 1, list(range(num_pages))
        self.free = list(range(num_pages, NUM_PAGES))
        self.num_known = 0
        self.border = 0  # newest one with a snapshot
        self.kept: dict[str, Tensor] = {}
        self._step(GOLDEN_IDS[:start], start)

    def _step(self, token_ids: Sequence[int], num_held: int, num_chained: int = 0) -> None:
        """A step of these rows, the first num_held of which are true; then the draft block."""
        start, pages = self.num_known, tuple(self.pages)
        inputs = forward_input([Piece(token_ids, start, self.slot, pages)])
        output = self.rig.model.forward(inputs, self.kv, self.rig.experts)
        end = start + num_held
        assert torch.equal(output.logits[:num_held], self.logits[start:end])
        joined = _next_ids(start, end, self.page_size)
        hidden = output.hidden_states[:num_held]
        piece = Piece(joined, start, self.slot, pages)
        drafted = self.rig.model.draft(forward_input([piece]), hidden, self.kv, self.rig.experts)
        assert torch.equal(drafted.logits, self.drafted[start:end])
        border = end // self.page_size * self.page_size
        if border > start and end - border <= MAX_DRAFTS:
            self.border = border
            self.kept = {
                g.name: self.kv[g.name][:, self.slot].clone() for g in self.rings if g.resume
            }
        hidden = drafted.hidden_states[-1:]
        for position in range(end, min(end + num_chained, len(GOLDEN_IDS) - 1)):
            piece = Piece([(position * 31) % 257], position, self.slot, pages)
            chained = forward_input([piece])
            hidden = self.rig.model.draft(chained, hidden, self.kv, self.rig.experts).hidden_states
        self.num_known = end

    @precondition(lambda self: self.num_known < len(GOLDEN_IDS) - 6)
    @rule(
        num_drafts=st.integers(0, MAX_DRAFTS), num_right=st.integers(0, 3), junk=st.integers(0, 256)
    )
    def verify(self, num_drafts: int, num_right: int, junk: int) -> None:
        num_held = 1 + min(num_drafts, num_right)
        true = GOLDEN_IDS[self.num_known : self.num_known + num_held]
        self._step([*true, *[junk] * (1 + num_drafts - num_held)], num_held, MAX_DRAFTS - 1)

    @precondition(lambda self: self.num_known < len(GOLDEN_IDS) - 40)
    @rule(size=st.integers(2, 30))
    def replay(self, size: int) -> None:
        self._step(GOLDEN_IDS[self.num_known : self.num_known + size], size)

    @rule(slot=st.integers(0, NUM_SLOTS - 1), turn=st.integers(1, 4))
    def move(self, slot: int, turn: int) -> None:
        """To the host and back: other pages, another slot, and junk where it was."""
        old, self.pages = self.pages, (self.free * 2)[turn : turn + len(self.pages)]
        self.free = [page for page in range(NUM_PAGES) if page not in self.pages]
        for group in self.paged:
            moved = self.kv[group.name][:, old].clone()
            self.kv[group.name].fill_(0x7F)
            self.kv[group.name][:, self.pages] = moved
        for group in self.rings:
            moved = self.kv[group.name][:, self.slot].clone()
            self.kv[group.name].fill_(0x7F)
            self.kv[group.name][:, slot] = moved
        self.slot = slot

    @precondition(lambda self: self.border > 0)
    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def resume(self, slot: int) -> None:
        """A new sequence with the pages up to a border and the snapshot kept there."""
        full = self.border // self.page_size
        for group in self.paged:
            kept = self.kv[group.name][:, self.pages[:full]].clone()
            self.kv[group.name].fill_(0x7F)
            self.kv[group.name][:, self.pages[:full]] = kept
        for group in self.rings:
            self.kv[group.name].fill_(0x7F)
            if group.resume:
                self.kv[group.name][:, slot] = self.kept[group.name]
        self.slot, self.num_known = slot, self.border


class GlmMachine(ModelMachine):
    kind = "glm"


TestV4State = ModelMachine.TestCase
TestGlmState = GlmMachine.TestCase
TestV4State.settings = TestGlmState.settings = QUICK


class Cyclic:
    """A grammar: the next token lies at most 20 above the last one, modulo 64."""

    def __init__(self) -> None:
        self.token_ids = [0]

    def _may_come(self, token_id: int) -> bool:
        return 0 < (token_id - self.token_ids[-1]) % 64 <= 20

    def accept(self, token_id: int) -> bool:
        if not self._may_come(token_id):
            return False
        self.token_ids.append(token_id)
        return True

    def fill(self, mask: Tensor) -> None:
        for word in range(2):
            bits = sum(self._may_come(word * 32 + bit) << bit for bit in range(32))
            mask[word] = bits - 2**32 if bits >= 2**31 else bits

    def rollback(self, num_tokens: int) -> None:
        del self.token_ids[len(self.token_ids) - num_tokens :]


def _constraint() -> Constraint:
    return Constraint(
        Cyclic(), vocab_size=64, after_token_id=None, forbidden_token_ids=(), end_token_ids=()
    )


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=1, max_tokens=40, presence_penalty=1.0, min_p=0.1),
    SamplingParams(
        temperature=0.0,
        max_tokens=40,
        thinking=ThinkingBudget(max_tokens=9, start_token_id=7, end_token_id=8),
    ),
    SamplingParams(temperature=1.0, seed=2, max_tokens=40, top_k=9, frequency_penalty=0.3),
]


class CoreMachine(RuleBasedStateMachine):
    """A core whose sequences come, go, are moved and step; what the sampler and the grammar keep is
    compared with what their tokens say after every step."""

    @initialize(rate=st.sampled_from([0.3, 0.8, 1.0]), host_blocks=st.sampled_from([0, 200]))
    def begin(self, rate: float, host_blocks: int) -> None:
        model = FakeModel(page_size=8, num_spec_tokens=MAX_DRAFTS, draft_rate=rate)
        self.core = make_core(model, num_pages=14, num_host_blocks=host_blocks, max_num_seqs=3)
        self.model = model
        self.num_submitted = 0

    @rule(params=st.sampled_from(PARAMS), length=st.integers(1, 20), held=st.booleans())
    def submit(self, params: SamplingParams, length: int, held: bool) -> None:
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        prompt = [(n * 13 + length) % 64 for n in range(length)]
        one = request(name, prompt)
        self.core.submit(type(one)(request_id=name, prompt_token_ids=prompt, params=params))
        if held and params.thinking is None:
            self.core._scheduler.sequences[name].constraint = _constraint()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.core.has_work:
                for event in self.core.step():
                    assert event.error is None

    @precondition(lambda self: self.num_submitted > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.core.abort(f"r{data.draw(st.integers(0, self.num_submitted - 1))}")

    @invariant()
    def state_is_what_the_tokens_say(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        sampler = self.core._runner.sampler
        for seq in self.core._scheduler.running:
            output = seq.token_ids[seq.prompt_len :]
            if seq.constraint is not None:
                fresh = _constraint()
                assert all(fresh.accept(token_id) for token_id in output)
                assert torch.equal(seq.constraint.masks(), fresh.masks())
            expected = SamplerState(1, 64)
            params = seq.request.params
            expected.admit(0, params, seq.request.prompt_token_ids, output, [], seq.seed)
            for name in ("_output_counts", "_in_prompt", "_is_thinking", "_thinking_left"):
                if params.thinking is not None or not name.endswith(("thinking", "left")):
                    kept, wanted = getattr(sampler, name)[seq.slot], getattr(expected, name)[0]
                    assert torch.equal(kept, wanted), name
            if output:
                assert int(sampler.last_token[seq.slot]) == output[-1]
        assert self.model.num_torn == 0

    def teardown(self) -> None:
        if hasattr(self, "core"):
            while self.core.has_work:
                self.step(4)
                self.state_is_what_the_tokens_say()


TestCoreState = CoreMachine.TestCase
TestCoreState.settings = settings(
    max_examples=10,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

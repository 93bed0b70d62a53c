"""Every parameter out of its range is a RequestError that names the field, before any work."""

import math

import pytest

from moet.errors import RequestError
from moet.runtime.sampling_params import validate_params
from moet.types import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", 2**64),
        ("min_p", -0.1),
        ("min_p", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("logit_bias", {99999999: 5.0}),
        ("logit_bias", {-1: 5.0}),
        ("logit_bias", {"AI": -100.0}),
        ("logit_bias", {5: 1e9}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: None}),
        ("allowed_token_ids", (100,)),
        ("allowed_token_ids", (1.5,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple([1] * 2000)),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 1001),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "x"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 10**9),
        ("stop", ("",)),
        ("stop", (5,)),
        ("stop", ("cut \ud83d",)),
        ("stop", ("x" * 1025,)),
        ("stop", tuple("s" * 10_000)),
    ],
)
@pytest.mark.bug("P18")
def test_p18_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        validate_params(SamplingParams(**{field: value}), vocab_size=100, max_model_len=1000)
    assert caught.value.param == field
    assert field in str(caught.value)
    assert len(str(caught.value)) < 250


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="max_tokens 3"):
        validate_params(SamplingParams(min_tokens=4, max_tokens=3), 100, 1000)


def test_every_limit_itself_is_accepted():
    validate_params(SamplingParams(), 100, 1000)
    params = SamplingParams(
        temperature=0,
        top_k=2**40,
        top_p=1,
        min_p=1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=10,
        logit_bias={0: -100, 99: 100.0},
        allowed_token_ids=(0, 99),
        stop_token_ids=(0, 99),
        stop=tuple(["x" * 1024] * 64),
        min_tokens=1000,
        max_tokens=10**9,
        seed=-(2**63),
        logprobs=20,
        prompt_logprobs=0,
    )
    validate_params(params, 100, 1000)
    validate_params(SamplingParams(max_tokens=0), 100, 1000)

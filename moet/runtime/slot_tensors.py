"""What sampling knows of each sequence slot, as tensors beside the logits. Knows no parameters by
name and no rules: sampler.py writes these, device_sampler.py reads them inside a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """All of length num_slots + 1; the last place is for rows that only fill a step.

    A parameter that a slot does not use holds the value that changes nothing, so that every rule
    may be applied to every row. last_token, seed, top_k, may_end_from, thinking_left: int64.
    temperature, min_p, presence, frequency, repetition: fp32; top_p: fp64. is_counted, is_thinking:
    bool. think_ids: [slots, 1 + ends] int64, the token that opens thinking, then those that close
    it, -1 for none. output_counts: [slots, vocab_size] int32; in_prompt, ends: bool and bias: fp32
    of that shape. Ids from num_token_ids on never come.
    """

    num_slots: int
    num_token_ids: int
    last_token: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    is_counted: Tensor
    output_counts: Tensor
    in_prompt: Tensor
    bias: Tensor
    ends: Tensor
    may_end_from: Tensor
    is_thinking: Tensor
    thinking_left: Tensor
    think_ids: Tensor

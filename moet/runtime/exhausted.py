"""What is said where a device's memory does not suffice although the plan counted on it: what was
asked for last, and which flags leave more. Knows nothing of plans."""

from __future__ import annotations

import torch


def failed_step(error: torch.OutOfMemoryError) -> str:
    """For the requests of a step."""
    return (
        f"the device has no memory left for a step like this one ({_asked(error)}). Lower "
        "--max-num-batched-tokens, which a step needs memory for, or --kv-cache-memory, which "
        "leaves steps the rest"
    )


def failed_start(error: torch.OutOfMemoryError) -> str:
    """For whoever started an engine."""
    return (
        f"the device's memory did not suffice while the engine started ({_asked(error)}). End what "
        "else uses it, or lower --kv-cache-memory, --max-num-seqs or --max-num-batched-tokens"
    )


def _asked(error: torch.OutOfMemoryError) -> str:
    return str(error).removeprefix("CUDA out of memory. ").split(". ")[0]

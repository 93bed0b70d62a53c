"""What every model's checkpoint says about itself once its published form is known. No bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from moet.errors import CheckpointError
from moet.models.expert_map import ExpertMap
from moet.models.tensor_files import TensorEntry
from moet.models.tensor_spec import TensorSpec

DenseDtype = Literal["keep", "fp8", "bf16"]


class Release(Protocol):
    """One checkpoint's form: config, names, shapes, dtypes.

    form: the name of the published form. optional: tensors that may be there and are not used.
    """

    @property
    def config(self) -> Any: ...

    @property
    def form(self) -> str: ...

    @property
    def experts(self) -> ExpertMap: ...

    @property
    def optional(self) -> frozenset[str]: ...

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor that must be there, in the order of the forward pass."""
        ...

    def dense_specs(self, dtype: DenseDtype) -> Sequence[TensorSpec]:
        """What a pack holds beside routed experts, with its linears in `dtype`.

        Raises CheckpointError if the model does not offer that.
        """
        ...

    def describe(self) -> str:
        """Which release this is and what moet will do with it, in a few sentences."""
        ...


def entry_of(entries: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    """The entry of a tensor that every published form has."""
    if name not in entries:
        raise CheckpointError(
            f"there is no tensor {name}; a checkpoint with the official names is needed"
        )
    return entries[name]

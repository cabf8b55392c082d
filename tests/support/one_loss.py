"""A loss by hand where the engine expects `Losses`; needs no import of them, which takes seconds on a rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onward.trainer.data.batches.batches import Batch


class OneLoss:
    """One loss of weight 1; a subclass defines `total`."""

    counts_itself = False
    own_divisor: Tensor | None = None

    def total(self, outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        raise NotImplementedError

    def __len__(self) -> int:
        return 1

    def check_labels(self, batch: Batch, outputs: object) -> None:
        pass

    def __call__(self, outputs: Sequence[Tensor], labels: Sequence[Tensor | None], size: int) -> tuple[Tensor, ...]:
        return (self.total(outputs, labels[0]),)

    def weighted(self, values: Sequence[Tensor], scale: float | Sequence[Tensor] = 1.0) -> Tensor:
        return values[0] * (scale if isinstance(scale, float) else scale[0])

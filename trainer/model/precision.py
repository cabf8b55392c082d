"""Arithmetic below fp32: which type the forward pass computes in, and the scale that keeps fp16 gradients alive."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from onward.trainer.config.sections import PrecisionConfig

Remedy = Literal["again", "skip", "none"]
MOST_SKIPS = 10
"""Overflows in a row that a static scale may skip before training has diverged."""
AT_REST = {"scale": 1.0, "finite_updates": 0.0}
"""What checkpoints of fp32 and bf16 said, before they said nothing; a scale that moves has counted when it is saved."""
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: matrix products and convolutions in `precision.compute`; fp32: nothing."""
    if config.compute == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=COMPUTE[config.compute])


class LossScaler:
    """What the loss is multiplied by before the backward pass; a 1 that never moves unless compute is fp16.

    The predecessor's rule (orttraining, core/framework/loss_scaler): start at 2^16; after 2000 finite
    updates in a row double, up to 2^24; after an overflow halve, down to 1, and count anew. A static scale
    never moves. All ranks must call the same methods, so the loop lets them agree on the overflow first.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._config = config
        self._dynamic = config.compute == "fp16" and not config.loss_scale
        self.scale = 1.0
        self._static = config.compute == "fp16" and config.loss_scale > 0
        self._finite_updates = 0
        self._skipped = 0
        if config.compute == "fp16":
            self.scale = config.loss_scale or config.initial_scale

    def grow(self) -> None:
        """A finite update was made."""
        self._finite_updates += self._dynamic
        self._skipped = 0
        if self._finite_updates >= self._config.growth_interval:
            self.scale = min(2.0 * self.scale, self._config.max_scale)
            self._finite_updates = 0

    def overflow(self) -> Remedy:
        """A gradient overflowed, on whichever rank: what to do about its update, which must not be made.

        Dynamic: try the same step `again`, at half the scale. Static: `skip` it, as the predecessor does, but
        not MOST_SKIPS times in a row. `none` when no scale can mend it: fp32, bf16, or the smallest scale.
        """
        self._finite_updates = 0
        self._skipped += 1
        if self._dynamic and self.scale > 1.0:
            self.scale = max(0.5 * self.scale, 1.0)
            return "again"
        return "skip" if self._static and self._skipped < MOST_SKIPS else "none"

    def state(self) -> dict[str, float]:
        """For the checkpoint: JSON-able; nothing of a scale that does not move."""
        return {"scale": self.scale, "finite_updates": float(self._finite_updates)} if self._dynamic else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on where `state` was taken, up to this configuration's greatest scale; begin anew where none moved."""
        if self._dynamic and any(state.get(key, 0.0) > least for key, least in AT_REST.items()):
            self.scale = min(state["scale"], self._config.max_scale)
            self._finite_updates = int(state["finite_updates"])

"""Scale the loss, so that fp16 gradients neither underflow nor overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from onward.trainer.config.sections.training import PrecisionConfig

Remedy = Literal["again", "skip", "none"]
GROWTH_INTERVAL = 2000
"""Updates without an overflow after which a dynamic scale doubles, as in ORT training and torch.amp.GradScaler."""
MAX_SCALE = 2.0**24
"""The largest dynamic scale of ORT training: beyond it, small gradients are exact and large ones overflow."""
MOST_SKIPS = 10
"""Overflows in a row that a static scale may skip before training has diverged."""
CONSTANT_STATE = {"scale": 1.0, "finite_updates": 0.0}
"""What older checkpoints of fp32 and bf16 contain; a dynamic scale has a larger scale or count when it is saved."""


class LossScaler:
    """The factor by which the loss is multiplied before the backward pass, so that small fp16 gradients are not 0.

        updates        1 ... 2000 | 2001 ... | overflow | ... 2000 more | ...
        scale          65536      | 131072   | 65536    | 65536         | 131072

    The rule of ORT training (orttraining, core/framework/loss_scaler): start at 2^16; double after 2000 finite updates
    in a row, up to 2^24; halve after an overflow, down to 1, and count again from 0. A static scale is constant, and
    in fp32 and bf16 the scale is 1. All ranks must make the same calls, so the loop sums the overflows first.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._dynamic = config.compute == "fp16" and not config.static_scale
        self.scale = 1.0
        self._static = config.compute == "fp16" and config.static_scale > 0
        self._finite_updates = 0
        self._skipped = 0
        if config.compute == "fp16":
            self.scale = config.static_scale or config.initial_scale

    def grow(self) -> None:
        """Count a finite update, and double the scale after enough of them."""
        self._finite_updates += self._dynamic
        self._skipped = 0
        if self._finite_updates >= GROWTH_INTERVAL:
            self.scale = min(2.0 * self.scale, MAX_SCALE)
            self._finite_updates = 0

    def overflow(self) -> Remedy:
        """Return what to do with an update whose gradients overflowed on any rank; it must not be made.

        "again": try the same step at half the scale (dynamic). "skip": skip the step, but not MOST_SKIPS times in a row
        (static). "none": no smaller scale helps (fp32, bf16, or the smallest scale).
        """
        self._finite_updates = 0
        self._skipped += 1
        if self._dynamic and self.scale > 1.0:
            self.scale = max(0.5 * self.scale, 1.0)
            return "again"
        # a user's static scale is not changed: an overflow now and then is normal, many in a row are not
        return "skip" if self._static and self._skipped < MOST_SKIPS else "none"

    def state(self) -> dict[str, float]:
        """Return the state to be saved, as JSON; {} if the scale is constant."""
        return {"scale": self.scale, "finite_updates": float(self._finite_updates)} if self._dynamic else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state, at MAX_SCALE at most; ignore the state of a constant scale."""
        # a state at its least values is that of a constant scale: a run that now needs a dynamic one begins with its
        # own
        if self._dynamic and any(state.get(key, 0.0) > least for key, least in CONSTANT_STATE.items()):
            self.scale = min(state["scale"], MAX_SCALE)
            self._finite_updates = int(state["finite_updates"])

"""Name the tensors in which two checkpoints differ."""

from __future__ import annotations

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import VerifiedCheckpoint
from onward.trainer.distributed.weights import NUM_NAMED, Placement


def differences(one: VerifiedCheckpoint, other: VerifiedCheckpoint) -> list[str]:
    """Return a clause for the first tensors, in the order of the model, that do not have the same bits; [] = none."""
    found = []
    shapes = one.shapes
    for name in [*shapes, *(name for name in other.shapes if name not in shapes)]:
        if shapes.get(name) != other.shapes.get(name):
            found.append(f"{name} has the shape {shapes.get(name)} in one, {other.shapes.get(name)} in the other")
            continue
        # one tensor at a time, so that two models need not fit into memory
        placement = {name: Placement.full(shapes[name])}
        a = load(one, placement)[1][name]
        b = load(other, placement)[1][name]
        if a.dtype != b.dtype:
            found.append(f"{name} is {a.dtype} in one, {b.dtype} in the other")
        # bits, not values: NaN differs from itself, and -0 equals 0
        elif a.contiguous().numpy(force=True).tobytes() != b.contiguous().numpy(force=True).tobytes():
            changed = int((a != b).sum())
            apart = f", by up to {float((a.double() - b.double()).abs().max()):.3g}" if changed else ""
            found.append(f"{name}: {changed} of {a.numel()} elements{apart}")
        if len(found) > NUM_NAMED:
            return [*found[:NUM_NAMED], "and more"]
    return found

"""The steps of the examination, in their order."""

from __future__ import annotations

from dataclasses import dataclass

STEP_LIMIT_S = 9 * 60.0
TOTAL_LIMIT_S = 40 * 60.0


@dataclass(frozen=True)
class Step:
    """One step: a process of its own, with a limit of time."""

    name: str
    module: str
    """Module in tests/gpu/: `test_X` is run by pytest, of `measure_X` the function `main` is called."""
    claim: str
    """What it proves or measures, for the page."""
    needs: tuple[str, ...] = ()
    """Packages without which the step is skipped, beside torch, onnx, numpy and pydantic."""
    limit_s: float = STEP_LIMIT_S


STEPS: tuple[Step, ...] = ()

EVERY_STEP_NEEDS = ("torch", "onnx", "numpy", "pydantic", "psutil")

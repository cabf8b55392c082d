"""Collect what a rehearsal finds; its record, or the error with everything that is wrong."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from onward.trainer.config.sections.model import FixedBatch
from onward.trainer.diagnostics.output_warnings import SELECTED
from onward.trainer.errors import ConfigError, Refused
from onward.trainer.rehearsal.sizes import Size
from onward.trainer.run.records import CompileTrial, ExporterWarning, Guard, Needs, Rehearsal, RehearsedBatch


@dataclass(frozen=True)
class Parity:
    """What a comparison found, relative to an output's greatest value."""

    difference: float
    """The greatest one of the file from the module."""
    rounding: float
    """What the runtime's kernels round, of a file with quantized weights; 0 if it had not to be measured."""
    runtime: str
    """What ran the file."""
    said: tuple[ExporterWarning, ...] = ()
    """What is said where the file is in training form."""

    def __str__(self) -> str:
        return self.runtime + (f", whose kernels round by {self.rounding:.2g}," if self.rounding else "")


@dataclass
class Findings:
    """What was found so far."""

    batches: list[RehearsedBatch] = field(default_factory=list)
    failures: list[tuple[Size, str]] = field(default_factory=list)
    """Micro-batches that do not run, and why."""
    errors: list[Refused] = field(default_factory=list)
    misfit: bool = False
    """Whether a loss does not fit its output at a size that runs, so that no other size is a remedy."""
    too_long: str = ""
    """How long rows may be, where an index is out of range in longer ones; else empty."""
    warnings: tuple[ExporterWarning, ...] = ()
    trained: int = 0
    numbers: tuple[int, int] = (0, 0)
    """As in the record."""
    without_gradient: tuple[str, ...] = ()
    parity: Parity | None = None
    fixed_batch: FixedBatch = "auto"
    output_units: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    """As in the record."""
    compute: Literal["", "fp32", "bf16"] = ""
    """What was chosen for `precision.compute`."""
    compile: CompileTrial | None = None
    """What was chosen for `graph.compile`."""
    not_rehearsed: list[str] = field(default_factory=list)
    needs: Needs | None = None
    guard: Guard | None = None
    pending: list[str] = field(default_factory=lambda: ["everything"])
    """What has not ended yet."""

    def refuse(self, problem: str) -> None:
        """Add something that is wrong."""
        self.errors.append(ConfigError(problem))

    def add_failure(self, size: Size, why: str, too_long: str) -> None:
        """Add a micro-batch that does not run. too_long: how long its rows may be, if their length is the reason."""
        self.failures.append((size, why))
        self.too_long = self.too_long or too_long

    def record(self, *, elapsed_s: float) -> Rehearsal:
        """Return the record. Raises ConfigError with all that is wrong; a single error is raised as it is."""
        errors = [*self.errors, *(ConfigError(problem) for problem in self._failures_by_cause())]
        if errors:  # what does not fit may be what a detector has chosen among its boxes
            selected = [each for each in self.warnings if each.key == SELECTED]
            errors += [ConfigError(f"{each.what}; {each.remedy}") for each in selected]
        # a single error keeps its type
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigError(dict.fromkeys(problem for error in errors for problem in error.problems))
        return Rehearsal(
            batches=tuple(self.batches),
            trained=self.trained,
            numbers=self.numbers,
            without_gradient=self.without_gradient,
            parity=self.parity.difference if self.parity else math.nan,
            judged_by=str(self.parity or ""),
            warnings=self.warnings,
            fixed_batch=self.fixed_batch,
            output_units=self.output_units,  # type: ignore[arg-type]
            units=self.units,
            compute=self.compute,
            compile=self.compile,
            not_rehearsed=tuple(self.not_rehearsed),
            needs=self.needs,
            guard=self.guard,
            elapsed_s=elapsed_s,
        )

    def _failures_by_cause(self) -> Iterator[str]:
        """Yield one sentence for each different reason, with all sizes that fail for it."""
        sizes = defaultdict(list)
        for size, why in self.failures:
            sizes[why].append(size)
        # what ran says what kind of remedy there is
        ran = {each.what for each in self.batches}
        for why, failed in sizes.items():
            what = " and ".join(size.what for size in failed)
            runs = "do not run" if len(failed) > 1 else "does not run"
            if self.misfit:
                remedy = "another size is no remedy, because the loss does not fit the output, as is said of other rows"
            elif self.too_long:
                remedy = self.too_long
            elif not ran:
                remedy = "the graph runs at none of the sizes that were tried; `onward doctor` lists its operators"
            elif ran == {"evaluation"} and failed[0].kind == "training":
                remedy = (
                    "the graph runs forward alone: train only what comes after that operator (model.start), or export "
                    "the model without it"
                )
            else:
                remedy = "; ".join(dict.fromkeys(size.remedy for size in failed))
            yield f"{what} {runs}: {why}; {remedy}"

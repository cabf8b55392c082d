"""The losses of a run: `[loss]` is one, `[[loss]]` one of several that are added up.

What an entry leaves out is read from the short form of one loss (`model.loss`, `model.output`, `model.ignore_index`,
`data.label`). `RunConfig.losses` holds the entries with everything filled in, and is what all code reads:

    [model] loss = "mse"                   ->  losses = (LossConfig(name="mse", output="", label="label", ...),)

    [[loss]] output = "boxes", name = "l1"     losses = (LossConfig(name="l1", output="boxes", ...),
    [[loss]] output = "kinds"              ->            LossConfig(name="cross_entropy", output="kinds", ...))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import PositiveFloat

from onward.trainer.config.section import Section
from onward.trainer.config.sections import DataConfig, LossName, ModelConfig


class LossConfig(Section):
    """A loss: what it is, the output that it reads, and the labels that it compares it with. Several `[[loss]]` are
    added up: the loss of a step is the sum of weight x mean over the targets of each."""

    name: LossName | Literal[""] = ""
    """The loss; empty = `model.loss`."""
    output: str = ""
    """The tensor that the loss reads, as in `model.output`; empty = `model.output`."""
    label: str | tuple[str, ...] = ""
    """The column (or columns) that the loss compares with; empty = `data.label`."""
    weight: PositiveFloat = 1.0
    """What the loss is multiplied by before several are added up."""
    ignore_index: int | None = None
    """Targets with this label are left out of the loss and of its mean (cross-entropy only); not set =
    `model.ignore_index`."""

    @property
    def ignored(self) -> int:
        """`ignore_index`, of an entry that is filled in."""
        assert self.ignore_index is not None
        return self.ignore_index

    @property
    def columns(self) -> tuple[str, ...]:
        """The label's columns; empty when the graph computes its own loss."""
        if not self.takes_labels:
            return ()
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def takes_labels(self) -> bool:
        """Whether the loss compares its output with labels; otherwise the graph computes the loss."""
        return self.name != "output"

    @property
    def has_classes(self) -> bool:
        """Whether the labels are numbers of classes, int64."""
        return self.name == "cross_entropy"


def filled(model: ModelConfig, data: DataConfig, loss: Sequence[LossConfig]) -> tuple[LossConfig, ...]:
    """Return every loss with name, output, label and ignored label filled in from the short form."""
    entries = tuple(loss) or (LossConfig(),)
    outputs = (model.output,) * len(entries) if isinstance(model.output, str) else model.output
    return tuple(
        each.model_copy(
            update={
                "name": each.name or model.loss,
                "output": each.output or output,
                "label": each.label or data.label,
                "ignore_index": model.ignore_index if each.ignore_index is None else each.ignore_index,
            }
        )
        for each, output in zip(entries, outputs, strict=False)
    )


def with_outputs(model: ModelConfig, losses: Sequence[LossConfig]) -> ModelConfig:
    """Return [model] with the outputs that the filled losses read, and of one loss its name, for surgery."""
    outputs = tuple(each.output for each in losses)
    found: dict[str, object] = {"output": outputs[0] if len(set(outputs)) == 1 else outputs}
    if len(losses) == 1:
        found["loss"] = losses[0].name
    return model.model_copy(update=found)


def titles(losses: Sequence[LossConfig], output_names: Sequence[str] = ()) -> list[str]:
    """Return what metrics of each loss are named after: its output, and its name where several losses read the output.

    output_names: those of the graph, for a loss that reads the first one without naming it.
    """
    outputs = [each.output or (output_names[0] if output_names else "first") for each in losses]
    names = [
        output if outputs.count(output) == 1 else f"{output}/{each.name}"
        for output, each in zip(outputs, losses, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name}/{place}" for place, name in enumerate(names)]


def key_of(losses: Sequence[LossConfig], place: int, setting: str) -> str:
    """Return how messages name a setting of a loss: `loss.weight`, or `loss.1.weight` where there are several."""
    return f"loss.{setting}" if len(losses) < 2 else f"loss.{place}.{setting}"


def contradictions(model: ModelConfig, data: DataConfig, loss: Sequence[LossConfig]) -> Iterable[str]:
    """Yield a sentence for each setting of a loss that the short form sets differently."""
    if not isinstance(model.output, str) and len(model.output) != max(len(loss), 1):
        yield f"model.output names {len(model.output)} tensors, but there are {len(loss)} [[loss]]; name one for each"
        return
    shorts: list[tuple[str, str, object, object]] = [
        ("name", "model.loss", model.loss, ModelConfig.model_fields["loss"].default),
        ("ignore_index", "model.ignore_index", model.ignore_index, ModelConfig.model_fields["ignore_index"].default),
        ("label", "data.label", data.label, DataConfig.model_fields["label"].default),
    ]
    for place, each in enumerate(loss):
        output = model.output if isinstance(model.output, str) else model.output[place]
        for setting, short, value, default in (*shorts, ("output", "model.output", output, "")):
            given = getattr(each, setting)
            if given not in ("", None, value) and value != default:
                yield (
                    f"{key_of(loss, place, setting)} is {given!r}, but its short form {short} is {value!r}; set one "
                    "of the two"
                )

"""The records of the preprocessings that `onward doctor` tries on labelled data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from onward.trainer.run.records import Record


class PreprocessingTrial(Record):
    """One preprocessing that was tried, and how well the model does under it."""

    settings: dict[str, Any]
    """The settings that differ from the configuration, such as `data.image.scale`; {} = as it is."""
    rows: int
    accuracy: float
    """`PreprocessingTrials.measure`; NaN if it was refused."""
    loss: float
    """Mean per target."""
    refused: str = ""
    """Why it could not be tried; else empty."""


class PreprocessingTrials(Record):
    """The accuracy of a model on labelled data under the plausible preprocessings, best first."""

    measure: Literal["accuracy", "precision", "r2"]
    """Of models of numbers: the share of the labels' variance that is explained."""
    chance: float
    """The accuracy of always naming the most frequent class; 0 for numbers."""
    better_than_chance: bool
    """Whether the best accuracy is above chance by more than three standard errors."""
    other_order: dict[int, int] = Field(default_factory=dict)
    """Label -> class of the model, if the model does much better under this other order of classes; else {}."""
    other_order_accuracy: float = 0.0
    """The accuracy under that order."""
    classes: tuple[str, ...] = ()
    """The names of the classes in the order of the labels, as far as the data has names."""
    sorted_by_name: bool = False
    """Whether that order is assumed: the names sorted, because `data.classes` gives no order."""
    model_classes: int = 0
    """The number of classes that the model tells apart; 0 for numbers."""
    trials: tuple[PreprocessingTrial, ...]

"""What each loss takes, compares and reports: one table, `LOSS_RULES`.

The formulas are in trainer/model/losses/loss_formulas.py, and as ONNX nodes in trainer/export/training/loss_nodes.py.
This table imports no torch, because a configuration is checked before anything is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onward.trainer.config.metric_names import Task

# fmt: off
LossName = Literal[
    "cross_entropy", "mse", "l1", "bce_with_logits", "output", "huber", "quantile", "focal", "dice", "giou", "ctc",
    "cosine", "triplet", "info_nce", "set_classes", "set_l1", "set_giou", "yolov5", "yolov8", "yolov10", "yolo26",
    "yolo26_end2end", "yolox", "fcos", "retinanet", "ssd", "centernet", "file", "teacher",
]
# fmt: on
"""The losses, by name."""

Labels = Literal["classes", "sequences", "elements", "quantiles", "boxes", "objects", "rows", "own", "none"]
"""How labels belong to an output [B, ...]:

    classes      a class number for each place, without the axis of the class scores; int64
    sequences    class numbers [B, L], for scores [B, T, C]; int64
    elements     a number for each element
    quantiles    a number for all elements of the last axis
    boxes        as elements, four of which are one box
    objects      the boxes of an image, of any number (data/schema/box_cells.py), which the loss assigns to outputs
    rows         a number for each row
    own          the user's loss pairs them
    none         no labels
"""


@dataclass(frozen=True)
class LossRule:
    """One loss, as far as it can be described without torch."""

    labels: Labels
    takes: tuple[str, ...] = ()
    """Settings of [loss] that only some losses take."""
    tasks: tuple[Task, ...] = ()
    """What outputs and labels are, which decides the metrics that fit; () = nothing is known but the loss."""
    metrics: tuple[str, ...] = ()
    """Reported where `metrics` is empty."""
    num_outputs: int = 1
    """Outputs that the loss reads; 0 = any number, some for each level of a grid."""
    applies: tuple[str, ...] = ()
    """Activations (onnx_graph/probabilities.py) whose results the loss would apply its own softmax or sigmoid to."""
    by_sample: bool = False
    """Whether its mean is over the samples; else it is over the targets (data/schema/target_counts.py)."""
    by_graph: bool = False
    """Whether the graph computes the loss itself, as the scalar output that is read."""
    compares_samples: bool = False
    """Whether the loss compares all samples of a step with each other, over all replicas."""
    binary_scores: bool = False
    """Of labels that are classes: whether a single score is that of class 1, by sigmoid."""
    sharded_logits: bool = False
    """Whether tensor parallelism computes it from logits of which each rank has some classes."""
    own_divisor: bool = False
    """Whether the loss counts by what its sum is divided, which depends on outputs. It is the only loss of a run."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Of a detector with a grid: what the raw outputs of a level are, in order -> channels for each anchor, 0 = all
    others."""
    background: int = 0
    """Scores in front of those of the classes."""
    by_level: bool = False
    """Whether the loss is a vector: a term of the images, and one for each level of a grid, each with its own number of
    targets (data/schema/anchor_matches.py)."""
    no_onnx: str = ""
    """Why the variant `training` cannot write it; "" = loss_nodes.py has its nodes."""
    synonyms: tuple[str, ...] = ()
    """Other names that people give to the loss."""

    @property
    def teacher(self) -> Literal["kl", "bce", "mse", ""]:
        """How the same output is compared with a teacher's; "" where nothing says what the output is."""
        if not self.tasks:
            return ""
        if self.tasks[0] in ("classes", "sequences"):
            return "kl"
        return "bce" if self.tasks[0] == "labels" else "mse"

    @property
    def has_grid(self) -> bool:
        """Whether a detector predicts boxes at every cell of a grid (model/losses/dense_heads/)."""
        return bool(self.roles)

    @property
    def has_anchors(self) -> bool:
        """Whether a cell has several predictions, of an anchor box each."""
        return "anchors" in self.takes

    @property
    def needs_two_scores(self) -> bool:
        """Whether the loss of one class is always 0."""
        return self.labels == "classes" and not self.binary_scores

    def num_classes(self, scores: int) -> int:
        """Return the number of classes of an output with so many scores."""
        return max(scores, 2) if self.binary_scores else scores


STANDARDISED = ("standardise_label", "output_units")
SOFTMAX = ("softmax", "log_of_softmax")
SIGMOID = ("sigmoid",)
ERRORS = ("mae", "mse")
DISTANCE_BINS = 16
"""Values of each distance, as in YOLOv8 to YOLO11."""
WITH_OBJECTNESS = {"boxes": 4, "objectness": 1, "scores": 0}
PLAIN = {"boxes": 4, "scores": 0}
DISTRIBUTIONS = {"boxes": 4 * DISTANCE_BINS, "scores": 0}
MATCHED = "ONNX has no operator that assigns boxes to outputs"


def _dense(roles: Mapping[str, int], *takes: str, by_level: bool = False, background: int = 0) -> LossRule:
    """Return the rule of a detector with a grid."""
    return LossRule(
        "objects",
        takes=("strides", "image_size", *takes),
        tasks=("objects",),
        metrics=("map", "map_50"),
        num_outputs=0,
        own_divisor=not by_level,
        roles=roles,
        by_level=by_level,
        background=background,
        no_onnx=MATCHED,
    )


LOSS_RULES: Mapping[LossName, LossRule] = {
    "cross_entropy": LossRule(
        "classes",
        takes=("class_axis", "ignore_index", "label_smoothing", "label_type", "class_weights"),
        tasks=("classes",),
        metrics=("accuracy",),
        applies=SOFTMAX,
        sharded_logits=True,
        synonyms=("ce", "crossentropy", "crossentropyloss"),
    ),
    "mse": LossRule("elements", takes=STANDARDISED, tasks=("values",), metrics=ERRORS, synonyms=("l2",)),
    "l1": LossRule("elements", takes=STANDARDISED, tasks=("values",), metrics=ERRORS, synonyms=("mae",)),
    "bce_with_logits": LossRule(
        "elements",
        takes=("class_weights", "positive_weights"),
        tasks=("labels",),
        metrics=("accuracy",),
        applies=SIGMOID,
        synonyms=("bce", "bcewithlogits", "bcewithlogitsloss"),
    ),
    "output": LossRule("none", by_graph=True),
    "huber": LossRule(
        "elements", takes=("delta", *STANDARDISED), tasks=("values",), metrics=ERRORS, synonyms=("smooth_l1",)
    ),
    "quantile": LossRule("quantiles", takes=("quantiles", *STANDARDISED), tasks=("quantiles",)),
    "focal": LossRule("elements", takes=("alpha", "gamma"), tasks=("labels",), metrics=("accuracy",), applies=SIGMOID),
    "ctc": LossRule(
        "sequences",
        takes=("ignore_index", "blank", "input_lengths"),
        tasks=("sequences",),
        applies=SOFTMAX,
        by_sample=True,
        no_onnx="ONNX has no operator for it",
    ),
    "dice": LossRule(
        "classes",
        takes=("class_axis", "ignore_index", "smooth"),
        tasks=("classes",),
        applies=("softmax", "sigmoid"),
        by_sample=True,
        binary_scores=True,
    ),
    "giou": LossRule("boxes", tasks=("boxes", "values")),
    "cosine": LossRule("rows", takes=("margin",), tasks=("pairs",), num_outputs=2, by_sample=True),
    "triplet": LossRule("none", takes=("margin",), tasks=("triplets",), num_outputs=3),
    "info_nce": LossRule("none", takes=("temperature",), tasks=("matches",), num_outputs=2, compares_samples=True),
    "set_classes": LossRule(
        "objects",
        takes=("scores", "num_queries", "image_size", "alpha", "gamma"),
        tasks=("objects",),
        metrics=("map", "map_50"),
        num_outputs=2,
        applies=("softmax", "sigmoid"),
        no_onnx=MATCHED,
    ),
    "set_l1": LossRule("objects", takes=("scores",), num_outputs=2, no_onnx=MATCHED),
    "set_giou": LossRule("objects", takes=("scores",), num_outputs=2, no_onnx=MATCHED),
    "yolov5": _dense(WITH_OBJECTNESS, "anchors", by_level=True),
    "yolov8": _dense(DISTRIBUTIONS),
    "yolov10": _dense(DISTRIBUTIONS),
    "yolo26": _dense(PLAIN),
    "yolo26_end2end": _dense(PLAIN),
    "yolox": _dense(WITH_OBJECTNESS),
    "fcos": _dense(WITH_OBJECTNESS, "alpha", "gamma"),
    "retinanet": _dense(PLAIN, "anchors", "alpha", "gamma"),
    "ssd": _dense(PLAIN, "anchors", background=1),
    "centernet": _dense({"scores": 0, "sizes": 2, "boxes": 2}),
    "file": LossRule("own", takes=("file", "label_type", "count"), by_sample=True),
    "teacher": LossRule("none"),
}
"""`loss.name` -> what the loss is."""


def losses_with(task: Task) -> list[str]:
    """Return the names of the losses whose outputs and labels are of this kind."""
    return [name for name, rule in LOSS_RULES.items() if task in rule.tasks]


DENSE_LOSSES = [name for name, rule in LOSS_RULES.items() if rule.has_grid]
"""Of detectors that predict boxes at every cell of a grid."""

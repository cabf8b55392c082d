"""Losses and metrics never reshape labels beyond axes of length 1: as many numbers in another order are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.distillation import SoftLoss
from onward.trainer.config.loss_rules import LOSS_RULES
from onward.trainer.config.losses import LossConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.losses.loss import Loss
from onward.trainer.model.losses.teacher_loss import TeacherLoss
from tests.support.metric_cases import CASES, data, metrics

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "choose-a-loss.md"
ROWS = 5


def loss_of(name: str, **settings: Any) -> Loss:
    names = ["a", "b", "c"][: LOSS_RULES[name].num_outputs]
    config = {"name": name, "ignore_index": -100, "output": names if len(names) > 1 else "a", **settings}
    return Loss(LossConfig.model_validate(config), names)


# -- the table of the documentation


def table() -> list[tuple[str, str, str, str]]:
    """Loss, output, labels, and labels that are refused, from the rows of the page's table; a line for each loss."""
    section = PAGE.read_text().partition("## Which axes are paired")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line[:1] == "|" and "`[B" in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(name, *row[1:]) for row in rows for name in re.findall(r"`(\w+)`", row[0])]


def shape(cell: str) -> list[int]:
    """The first shape of a cell."""
    dims = re.findall(r"\[([^\]]+)\]", cell)[0]
    return [eval(dim.replace("x", "*"), {"B": ROWS}) for dim in dims.split(",")]


def paired(name: str, output: str, labels: str) -> Tensor:
    """The loss of random outputs and labels of these shapes."""
    random = torch.Generator().manual_seed(0)
    scores = [torch.rand(shape(output), generator=random) for _ in range(LOSS_RULES[name].num_outputs)]
    is_soft = name == "cross_entropy" and shape(output) == shape(labels)
    kind = torch.int64 if LOSS_RULES[name].labels in ("classes", "sequences") and not is_soft else torch.float32
    settings: dict[str, Any] = {"label_type": "float32"} if is_soft else {}
    settings |= {"quantiles": (0.1, 0.9)} if name == "quantile" else {}
    return loss_of(name, **settings)(scores, torch.ones(shape(labels), dtype=kind), ROWS)


def test_the_table_has_every_loss_that_pairs_labels() -> None:
    paired = {loss for loss, rule in LOSS_RULES.items() if rule.labels not in ("own", "none", "objects")}
    assert {name for name, *_ in table()} == paired


@pytest.mark.parametrize(("name", "output", "labels", "refused"), table())
def test_a_loss_pairs_the_axes_that_the_documentation_says(name: str, output: str, labels: str, refused: str) -> None:
    assert paired(name, output, labels).isfinite()
    with pytest.raises(ConfigError) as refusal:
        paired(name, output, refused)
    for found in (shape(output), shape(refused)):
        assert str(found) in str(refusal.value), "both shapes are in the message"


# -- losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_more_rows_than_labels_are_refused_in_every_arithmetic(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"\[32, 5\] and the labels are \[8\]: the output has 32 rows for a batch"):
        loss_of("cross_entropy")(torch.zeros(32, 5, dtype=dtype), torch.zeros(8, dtype=torch.int64), 8)
    flat = loss_of("cross_entropy")(torch.zeros(32, 5, dtype=dtype), torch.zeros(8, 4, dtype=torch.int64), 8)
    assert float(flat) == pytest.approx(32 * torch.tensor(5.0).log().item(), rel=1e-6)


def test_positions_pair_in_order_however_neighbouring_axes_are_joined() -> None:
    random = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(4, 3, 7, 6, generator=random), torch.randint(3, (4, 7, 6), generator=random)
    expected = F.cross_entropy(scores, labels, reduction="sum")
    for own in (labels, labels.flatten(1), labels[:, None]):
        torch.testing.assert_close(loss_of("cross_entropy")(scores, own, 4), expected)
    rows = scores.movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(loss_of("cross_entropy")(rows, labels, 4), expected)
    with pytest.raises(ConfigError, match=r"store them as numpy.transpose\(labels, \(0, 2, 1\)\)"):
        loss_of("cross_entropy")(scores, labels.transpose(1, 2), 4)
    with pytest.raises(ConfigError, match="the loss cannot be computed"):  # 6 x 3 and 7: not neighbours
        loss_of("cross_entropy", class_axis=1)(torch.zeros(4, 5, 7, 6, 3), torch.zeros(4, 18, 7).long(), 4)


def test_probabilities_pair_with_scores_class_by_class() -> None:
    soft = loss_of("cross_entropy", label_type="float32", class_axis=1)
    random = torch.Generator().manual_seed(0)
    scores, labels = (torch.randn(4, 3, 7, generator=random) for _ in range(2))
    labels = labels.softmax(1)
    torch.testing.assert_close(soft(scores, labels, 4), F.cross_entropy(scores, labels, reduction="sum"))
    with pytest.raises(ConfigError, match=r"\[4, 3, 7\] and the labels are \[4, 7, 3\].*\(0, 2, 1\)"):
        soft(scores, labels.transpose(1, 2).contiguous(), 4)
    last = loss_of("cross_entropy", label_type="float32", class_axis=2)
    with pytest.raises(ConfigError, match=r"loss.class_axis 2 has 3 classes in the output, but 4 in the labels"):
        last(torch.zeros(4, 1, 3), torch.zeros(4, 3), 4)


def test_a_teacher_of_other_rows_or_a_mask_of_other_positions_is_refused() -> None:
    soft = SoftLoss(0, "a", "b", "kl", 1.0, 1.0, matched=False)
    loss = TeacherLoss(soft, [soft.own_output or "a", soft.teacher_output], {})
    with pytest.raises(ConfigError, match="teacher"):
        loss([torch.zeros(8, 5), torch.zeros(32, 5)], None, 8)
    with pytest.raises(ConfigError, match=r"\[4, 5\] and the labels are \[1\]"):  # it would broadcast
        loss([torch.zeros(4, 5), torch.zeros(4, 5)], torch.ones(1, dtype=torch.bool), 1)


# -- metrics


@pytest.mark.parametrize(("loss", "entry"), [(loss, entry) for loss, entry, _ in CASES], ids=lambda each: str(each))
def test_a_metric_of_labels_in_another_order_is_refused(loss: str, entry: str | dict[str, Any]) -> None:
    """As many numbers as the right labels: the metric of these in memory order would be some other number."""
    outputs, labels = data(loss)
    if labels is None:
        outputs = [outputs[0], *(part.repeat(4, 1) for part in outputs[1:])]
    else:
        labels = labels.movedim(0, -1).contiguous() if labels.ndim > 1 else labels[:-1]
    totals = metrics(loss, entry)
    with pytest.raises(ConfigError, match="cannot be computed"):
        totals.update(outputs, [labels], len(outputs[0]))


def test_metrics_of_a_loss_of_your_own_pair_axes_though_the_loss_itself_is_not_asked() -> None:
    (output,), labels = data("file float32")
    assert labels is not None
    with pytest.raises(
        ConfigError, match=r"the metrics of the loss 'file' cannot be computed: output 'a' is \[60, 3\] and .*\[3, 60\]"
    ):
        metrics("file float32", "rmse").update([output], [labels.T.contiguous()], 60)
    found = metrics("file float32", "rmse")
    found.update([output], [labels[:, None]], 60)
    assert found.compute()["rmse"] == pytest.approx(float((output - labels).square().mean().sqrt()), rel=1e-6)

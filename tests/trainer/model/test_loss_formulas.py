"""Each loss is torch's (or torchvision's) own formula, value and gradient; its sum over its count is their mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.schema.target_counts import label_range
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.model.losses.loss import Loss
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_graph.torchvision_import import import_torchvision

random = torch.Generator().manual_seed(0)
IMAGE, MASK = torch.randn(2, 3, 4, 5, generator=random), torch.randint(0, 3, (2, 4, 5), generator=random)
MASK[0, 1] = -100
SCORES, CLASSES = torch.randn(6, 5, generator=random), torch.randint(0, 5, (6,), generator=random)
WEIGHTS = (0.1, 0.2, 0.05, 3.0, 0.0)
YES = torch.randint(0, 2, (6, 5), generator=random).float()
BOXES = torch.rand(7, 2, 4, generator=random).sort(-1).values[..., [0, 1, 2, 3]]
SEQUENCE = torch.randn(3, 9, 5, generator=random)
LABELS = torch.tensor([[1, 2, 2, 4], [3, -100, -100, -100], [1, 1, -100, -100]])
ROWS = [torch.randn(6, 8, generator=random) for _ in range(3)]
ALIKE = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])


@dataclass(frozen=True)
class Case:
    outputs: Tensor | list[Tensor]
    labels: Tensor | None
    formula: Callable[..., Tensor]
    settings: dict[str, Any] = field(default_factory=dict)


def probabilities(like: Tensor, axis: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).softmax(axis)


def torchvision_ops(name: str) -> Callable[..., Tensor]:
    def call(*arguments: Any, **how: Any) -> Tensor:
        import_torchvision()
        from torchvision import ops

        value: Tensor = getattr(ops, name)(*arguments, **how)
        return value

    return call


def torch_ctc(output: Tensor, labels: Tensor, steps: Tensor | None = None) -> Tensor:
    lengths = (labels != -100).sum(1)
    steps = torch.full((3,), 9) if steps is None else steps
    return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), labels.clamp(min=0), steps, lengths)


def dice_by_hand(output: Tensor, labels: Tensor) -> Tensor:
    values = []
    for scores, own in zip(output.softmax(1), labels, strict=True):
        counted = own != -100
        for number in range(3):
            ours, theirs = scores[number][counted], (own == number)[counted].float()
            values.append(1 - (2 * (ours * theirs).sum() + 1) / (ours.sum() + theirs.sum() + 1))
    return torch.stack(values).mean()


def clip(queries: Tensor, keys: Tensor) -> Tensor:
    scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T / 0.1
    own = torch.arange(len(queries))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def pinball(output: Tensor, labels: Tensor) -> Tensor:
    d = labels[:, None] - output
    levels = torch.tensor([0.1, 0.5, 0.9])
    return torch.where(d > 0, levels * d, (levels - 1) * d).mean()


CASES: dict[str, Case] = {
    "cross_entropy, images": Case(IMAGE, MASK, F.cross_entropy),
    "cross_entropy, classes in the middle": Case(
        IMAGE.transpose(1, 2), MASK, lambda o, t: F.cross_entropy(o.transpose(1, 2), t), {"class_axis": 2}
    ),
    "cross_entropy, smoothing": Case(
        IMAGE, MASK, lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2), {"label_smoothing": 0.2}
    ),
    "cross_entropy, weights": Case(
        SCORES, CLASSES, lambda o, t: F.cross_entropy(o, t, torch.tensor(WEIGHTS)), {"class_weights": WEIGHTS}
    ),
    "cross_entropy, weights and smoothing": Case(
        IMAGE,
        MASK,
        lambda o, t: F.cross_entropy(o, t, torch.tensor(WEIGHTS[:3]), label_smoothing=0.1),
        {"class_weights": WEIGHTS[:3], "label_smoothing": 0.1},
    ),
    "cross_entropy, probabilities": Case(SCORES, probabilities(SCORES, 1), F.cross_entropy, {"label_type": "float32"}),
    "cross_entropy, probabilities of images": Case(
        IMAGE,
        probabilities(IMAGE, 1),
        lambda o, t: F.cross_entropy(o, t, torch.tensor(WEIGHTS[:3]), label_smoothing=0.1),
        {"label_type": "float32", "class_axis": 1, "class_weights": WEIGHTS[:3], "label_smoothing": 0.1},
    ),
    "bce_with_logits": Case(
        SCORES,
        YES,
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, torch.tensor(WEIGHTS), pos_weight=torch.tensor([2.0])),
        {"class_weights": WEIGHTS, "positive_weights": (2.0,)},
    ),
    "huber": Case(SCORES, SCORES.flip(0), lambda o, t: F.huber_loss(o, t, delta=0.3), {"delta": 0.3}),
    "quantile": Case(SCORES[:, :3], YES[:, 0], pinball, {"quantiles": (0.1, 0.5, 0.9)}),
    "focal": Case(
        SCORES,
        YES,
        lambda o, t: torchvision_ops("sigmoid_focal_loss")(o, t, alpha=0.3, gamma=1.5, reduction="mean"),
        {"alpha": 0.3, "gamma": 1.5},
    ),
    "dice": Case(IMAGE, MASK, dice_by_hand),
    "giou": Case(
        BOXES[:, 0], BOXES[:, 1], lambda o, t: torchvision_ops("generalized_box_iou_loss")(o, t, reduction="mean")
    ),
    "ctc": Case(SEQUENCE, LABELS, torch_ctc),
    "ctc, input lengths": Case(
        SEQUENCE,
        torch.cat([torch.tensor([[9], [1], [4]]), LABELS], 1),  # the time steps in front, as a batch has them
        lambda o, t: torch_ctc(o, t[:, 1:], t[:, 0]),
        {"input_lengths": "steps"},
    ),
    "cosine": Case(ROWS[:2], ALIKE, lambda a, b, t: F.cosine_embedding_loss(a, b, t, margin=0.1), {"margin": 0.1}),
    "triplet": Case(ROWS, None, lambda *rows: F.triplet_margin_loss(*rows, margin=0.7), {"margin": 0.7}),
    "info_nce": Case(ROWS[:2], None, clip, {"temperature": 0.1}),
}


def loss_of(case: str) -> Loss:
    settings = {"name": case.partition(",")[0], "ignore_index": -100, **CASES[case].settings}
    outputs = CASES[case].outputs
    names = ["a"] if isinstance(outputs, Tensor) else [*"abc"[: len(outputs)]]
    return Loss(LossConfig.model_validate(settings | {"output": names if len(names) > 1 else "a"}), names)


def leaves(outputs: Tensor | list[Tensor]) -> list[Tensor]:
    return [each.clone().requires_grad_() for each in ([outputs] if isinstance(outputs, Tensor) else outputs)]


@pytest.mark.parametrize("name", CASES)
def test_sum_over_count_and_its_gradient_are_torchs_mean(name: str) -> None:
    case, loss = CASES[name], loss_of(name)
    ours, theirs = leaves(case.outputs), leaves(case.outputs)
    mean = loss(ours, case.labels, len(ours[0])) / loss.count(case.labels, len(ours[0]))
    expected = case.formula(*theirs, *([] if case.labels is None else [case.labels]))
    torch.testing.assert_close(mean.double(), expected.double(), rtol=1e-5, atol=1e-6)
    for found, wanted in zip(torch.autograd.grad(mean, ours), torch.autograd.grad(expected, theirs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("info_nce")])
def test_the_mean_does_not_depend_on_how_samples_are_batched(name: str) -> None:
    case, loss = CASES[name], loss_of(name)
    outputs = leaves(case.outputs)
    size = len(outputs[0])
    sums, counts = 0.0, 0.0
    for rows in (slice(0, 1), slice(1, size)):
        labels = None if case.labels is None else case.labels[rows]
        number = len(range(*rows.indices(size)))
        sums += float(loss([each[rows] for each in outputs], labels, number).detach())
        counts += float(loss.count(labels, number))
    expected = case.formula(*outputs, *([] if case.labels is None else [case.labels]))
    assert sums / counts == pytest.approx(float(expected.detach()), rel=1e-5)


def test_the_classes_of_a_square_image_are_not_taken_from_its_last_axis() -> None:
    """It was 103.6 where torch gives 94.2, because a loss over the last axis fits by chance."""
    random = torch.Generator().manual_seed(3)
    output, labels = 50 * torch.randn(2, 5, 5, 5, generator=random), torch.randint(0, 5, (2, 5, 5), generator=random)
    expected = F.cross_entropy(output, labels, reduction="sum")
    settings = {"name": "cross_entropy", "ignore_index": -100}
    wrong = F.cross_entropy(output.reshape(-1, 5), labels.flatten(), reduction="sum")
    assert abs(float(wrong / expected) - 1) > 0.01, "the wrong axis gives another number, and no error"
    with pytest.raises(ConfigError, match=r"loss.class_axis = 1 or loss.class_axis = 2 or loss.class_axis = 3"):
        Loss(LossConfig.model_validate(settings), ["y"])(output, labels, 2)
    given = Loss(LossConfig.model_validate(settings | {"class_axis": 1}), ["y"])
    declared = Loss(LossConfig.model_validate(settings), ["y"], {"y": (None, 5, None, None)})
    for loss in (given, declared):
        torch.testing.assert_close(loss(output, labels, 2), expected)
        assert torch.equal(loss.predicted(output, labels), output.argmax(1))
        for dtype in (torch.float16, torch.bfloat16):
            half = loss(output.to(dtype), labels, 2)
            torch.testing.assert_close(half, F.cross_entropy(output.to(dtype).float(), labels, reduction="sum"))


def test_an_absent_class_has_no_dice_loss_and_one_class_is_a_sigmoid() -> None:
    loss = Loss(LossConfig.model_validate({"name": "dice", "ignore_index": -100}), ["y"])
    sure = torch.full((1, 3, 2, 2), -40.0)
    sure[:, 0] = 40.0
    assert float(loss(sure, torch.zeros(1, 2, 2, dtype=torch.int64), 1)) == pytest.approx(0.0, abs=1e-6)
    yes = torch.ones(1, 2, 2, dtype=torch.int64)
    assert float(loss(torch.full((1, 1, 2, 2), 40.0), yes, 1)) == pytest.approx(0.0, abs=1e-6)


def test_time_steps_beyond_the_input_length_have_no_part_in_a_ctc() -> None:
    loss = loss_of("ctc, input lengths")
    labels, other = CASES["ctc, input lengths"].labels, SEQUENCE.clone()
    other[1, 1:], other[2, 4:] = torch.nan, torch.inf
    (one, changed), gradients = leaves([SEQUENCE, other]), []
    for output in (one, changed):
        value = loss(output, labels, 3)
        gradients.append(torch.autograd.grad(value, output)[0])
        assert bool(value.isfinite())
    assert not gradients[1][1, 1:].nan_to_num(0.0).any()
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=0, atol=0)


def checked(labels: Any, outputs: Tensor, **settings: Any) -> None:
    config = LossConfig.model_validate({"name": "ctc", "ignore_index": -1, **settings})
    tensor = torch.tensor(labels)
    rows = np.arange(10, 10 + len(tensor))
    batch = Batch((), (tensor,), len(tensor), (1.0,), label_ranges=(label_range(tensor, config),), rows=rows)
    Loss(config, ["scores"]).check_labels(batch, outputs)


def test_labels_that_a_ctc_cannot_reach_are_refused_with_the_numbers() -> None:
    output, lengths = torch.zeros(2, 5, 4), {"input_lengths": "steps"}
    with pytest.raises(
        DataError, match=r"'scores', row 11 of the split: its labels need 4 time steps \(3 labels.*\(steps\) is 3"
    ):
        checked([[3, 1, 2, 3], [3, 1, 1, 2]], output, **lengths)
    with pytest.raises(DataError, match=r"row 10 .*\(steps\) is 6, but must be 1..5, the time steps of the output"):
        checked([[6, 1, 2, 3], [5, 1, 1, 2]], output, **lengths)
    with pytest.raises(DataError, match=r"row 10 .* is 0, but must be 1\.\.5(.|\n)*row 11 .* is -2"):
        checked([[0, 1], [-2, 1]], output, **lengths)
    with pytest.raises(DataError, match=r"row 10 .* need 6 time steps \(5 labels, of which 1 repeat .* is 5"):
        checked([[1, 1, 2, 3, 1], [1, 2, 1, 2, 1]], output)
    with pytest.raises(DataError, match=r"row 11 .*: a label is 0, which is loss.blank"):
        checked([[1, 2], [1, 0]], output)
    with pytest.raises(DataError, match=r"row 10 .*: the ignored label -1 is followed by others"):
        checked([[1, -1, 2], [1, -1, -1]], output)
    with torch.no_grad():  # an evaluation may report an infinite loss
        checked([[1, 1, 2, 3, 1], [1, 2, 1, 2, 1]], output)
    checked([[5, 1, 1, 2], [3, 1, 1, -1]], output, **lengths)


# -- losses of files

SOURCE = """
import torch

def cubes(output, labels):
    return ((output - labels).abs() ** 3).mean(1).sum()

def rows(output, labels):
    return (output - labels).sum(1)

def broken(output, labels):
    return output @ labels

def positive(labels, size):
    return (labels > 0).sum()

def counts(labels, size):
    return {"number": 3, "less": -1, "nan": float("nan"), "text": "3", "truth": True, "vector": labels[:, 0],
            "gradient": torch.ones((), requires_grad=True)}[wrong]

def raises(labels, size):
    return labels.nothing
"""


def of_file(file: str, **settings: Any) -> Loss:
    return Loss(LossConfig.model_validate({"name": "file", "file": file, "ignore_index": -100, **settings}), ["y"])


def test_a_python_function_is_a_loss(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    loss, output = of_file(f"{tmp_path}/mine.py:cubes"), SCORES.clone().requires_grad_()
    value = loss(output, YES, 6) / loss.count(YES, 6)
    expected = ((SCORES - YES).abs() ** 3).mean()
    torch.testing.assert_close(value, expected)
    value.backward()
    assert output.grad is not None


def test_the_function_of_loss_count_counts_the_targets(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    loss = of_file(f"{tmp_path}/mine.py:cubes", count="positive")
    assert loss.count(YES, 6) == float(YES.sum())
    assert loss.count(YES[:2], 2) + loss.count(YES[2:], 4) == loss.count(YES, 6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    {
        "less": r"returned -1 for labels \[6, 5\]; it must be 0 or more",
        "nan": "returned nan",
        "text": r"returned str for labels \[6, 5\], not a number",
        "truth": "returned bool",
        "vector": r"returned a tensor \[6\]",
        "gradient": "returned a tensor with a gradient; count the labels, or detach it",
    }.items(),
)
def test_a_count_that_is_no_number_of_targets_is_refused(wrong: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{SOURCE}\nwrong = {wrong!r}\n")
    with pytest.raises(ConfigError, match=rf"loss.count {tmp_path}/mine.py:counts {message}"):
        of_file(f"{tmp_path}/mine.py:cubes", count="counts").count(YES, 6)


def test_a_count_that_raises_or_is_absent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=r"mine.py:raises failed on labels \[6, 5\]: AttributeError"):
        of_file(f"{tmp_path}/mine.py:cubes", count="raises").count(YES, 6)
    with pytest.raises(ConfigError, match=r"loss.count .*/mine.py has no function 'absent'"):
        of_file(f"{tmp_path}/mine.py:cubes", count="absent")


def test_what_is_wrong_with_a_loss_file_is_said_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    for file, message in {
        "absent.py:f": "there is no file",
        "mine.py": "names no function; write mine.py:my_function",
        "mine.py:squares": "has no function 'squares'",
        "bad.py:f": "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name'",
        "mine.py:rows": r"mine.py:rows returned a tensor \[6\], not the sum over the rows",
        "mine.py:broken": r"mine.py:broken failed on output \[6, 5\] and labels \[6, 5\]: RuntimeError",
    }.items():
        with pytest.raises(ConfigError, match=message):
            of_file(f"{tmp_path}/{file}")(SCORES, YES, 6)


@pytest.mark.parametrize("keepdims", [False, True])
def test_an_onnx_file_is_a_loss_of_rows_or_their_mean(keepdims: bool, tmp_path: Path) -> None:
    g = GraphWriter("squares", seed=0)
    difference = g.op("Sub", g.input("output", ("batch", 5)), g.input("labels", ("batch", 5)))
    squares = g.op("Mul", difference, difference)
    if keepdims:
        g.op("ReduceMean", squares, g.weight("axes", [1]), keepdims=0, outputs="loss")
        g.output("loss", ("batch",))
    else:
        g.op("ReduceMean", squares, keepdims=0, outputs="loss")
        g.output("loss", ())
    onnx.save(g.model(), tmp_path / "squares.onnx")
    loss = of_file(f"{tmp_path}/squares.onnx")
    output = SCORES.clone().requires_grad_()
    value = loss(output, YES, 6) / 6
    torch.testing.assert_close(value, F.mse_loss(SCORES, YES))
    value.backward()
    torch.testing.assert_close(output.grad, 2 * (SCORES - YES) / 30)

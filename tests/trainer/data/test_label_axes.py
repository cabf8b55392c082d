"""Labels are paired with an output axis by axis; what does not pair is refused with both shapes and what to do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.label_axes import Dims, check_axes, fits, label_shape, remedy
from onward.trainer.errors import ConfigError


def loss(name: str, **settings: Any) -> LossConfig:
    return LossConfig.model_validate({"name": name, "ignore_index": -100, **settings})


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (4, 3, 2), (4, 1, 3), (1, 1), (2, 2)])
def test_shapes_pair_exactly_if_they_are_equal_without_their_axes_of_length_1(shape: tuple[int, ...]) -> None:
    others = itertools.chain.from_iterable(itertools.product((1, 2, 3, 4), repeat=axes) for axes in range(4))
    for other in others:
        equal = [dim for dim in shape if dim != 1] == [dim for dim in other if dim != 1]
        assert fits(shape, other) == fits(other, shape) == equal, other


@pytest.mark.parametrize(
    ("output", "labels", "pair"),
    [
        ((None, 8, 3), (8, 8, 3), True),
        ((None, None, 3), (3, 8, 8), False),
        ((None, 3), (3,), True),  # the length that is not known may be 1
        ((None,), (), True),
        ((2, None), (3,), False),
    ],
)
def test_a_length_that_is_not_known_fits_any(output: Dims, labels: Dims, pair: bool) -> None:
    assert fits(output, labels) == pair


@pytest.mark.parametrize("wanted", [(8, 8, 3), (5, 7, 3), (4, 2), (2, 1, 4), (3, 3, 3, 2)])
def test_the_transpose_that_a_message_names_gives_the_labels_the_shape_of_the_output(wanted: tuple[int, ...]) -> None:
    named = 0
    for order in itertools.permutations(range(len(wanted))):
        labels = np.zeros((6, *(wanted[axis] for axis in order)))
        advice = remedy(wanted, labels.shape[1:])
        if fits(wanted, labels.shape[1:]):
            continue
        line = advice.partition("store them as ")[2].partition(" or ")[0]
        assert line.startswith("numpy.transpose(labels, (0, ")
        turned: np.ndarray[Any, Any] = eval(line, {"numpy": np, "labels": labels})
        assert fits(wanted, turned.shape[1:])
        named += 1
    assert named


def test_every_transpose_that_fits_is_named_where_two_axes_are_equally_long() -> None:
    advice = remedy((8, 8, 3), (3, 8, 8), "y")
    assert advice == (
        "their axes are in another order: store them as numpy.transpose(y, (0, 2, 3, 1)) or (0, 3, 2, 1), whichever "
        "puts each axis where the output has it"
    )
    assert remedy((5, 4, 3), (3, 5, 4), "y").endswith("numpy.transpose(y, (0, 2, 3, 1))")


def test_flat_labels_are_to_be_given_a_shape_and_labels_of_another_number_are_not() -> None:
    assert "numpy.reshape(y, (-1, 2, 3)) if it is that of the output" in remedy((2, 3), (6,), "y")
    assert remedy((2, 3), (5,)) == remedy((2, None), (7,)) == ""


REFUSED: dict[str, tuple[LossConfig, list[Dims], Dims | None, str]] = {
    "channels last": (
        loss("mse"),
        [(8, 8, 8, 3)],
        (8, 3, 8, 8),
        r"output 'a' is \[8, 8, 8, 3\] and the labels are \[8, 3, 8, 8\]: the labels must be \[8, 8, 8, 3\].*"
        r"numpy.transpose\(labels, \(0, 2, 3, 1\)\)",
    ),
    "rows of positions": (
        loss("mse"),
        [(32, 3, 8, 8)],
        (8, 3, 16, 16),
        "the output has 32 rows for a batch of 8, 4 for each sample, and row i of the output must be that of sample i",
    ),
    "part of the rows": (loss("l1"), [(18, 3)], (8, 3), "the output has 18 rows for a batch of 8, and row i"),
    "time in front": (loss("huber"), [(5, 8, 3)], (8, 5, 3), "the 8 rows of the batch are on axis 1 of the output"),
    "fewer numbers": (loss("mse"), [(8, 4)], (8, 3), r"must be \[8, 4\].*; name another column \(data.label\)"),
    "points": (loss("bce_with_logits"), [(8, 5, 2)], (8, 2, 5), r"numpy.transpose\(labels, \(0, 2, 1\)\)"),
    "quantiles in front": (
        loss("quantile", quantiles=(0.1, 0.5, 0.9)),
        [(8, 3, 5)],
        (8, 5),
        "the last axis of the output must have the 3 quantiles",
    ),
    "quantiles of no axis": (loss("quantile", quantiles=(0.1, 0.9)), [(2,)], (2,), "must have the 2 quantiles"),
    "labels of quantiles": (loss("quantile", quantiles=(0.1, 0.9)), [(8, 5, 4, 2)], (8, 4, 5), r"\(0, 2, 1\)"),
    "boxes on the first axis": (loss("giou"), [(8, 4, 100)], (8, 4, 100), "must have the 4 numbers of a box"),
    "boxes of five numbers": (loss("giou"), [(8, 5)], (8, 5), "must have the 4 numbers of a box"),
    "boxes and their labels": (loss("giou"), [(8, 7, 4)], (8, 4, 7), r"numpy.transpose\(labels, \(0, 2, 1\)\)"),
    "time of a ctc in front": (loss("ctc"), [(20, 8, 5)], (8, 5), "the output has 20 rows for a batch of 8"),
    "one time step in front": (loss("ctc"), [(1, 8, 5)], (8, 1), "the output has 1 rows for a batch of 8"),
    "labels of a ctc on two axes": (loss("ctc"), [(8, 20, 5)], (8, 2, 3), r"the labels must be \[8, \?\]"),
    "a ctc without time": (loss("ctc"), [(8, 5)], (8, 3), r"must be \[rows, time steps, classes\]"),
    "rows of masks": (loss("dice"), [(32, 3, 8, 8)], (8, 256), "the output has 32 rows for a batch of 8"),
    "alike or not of other rows": (loss("cosine"), [(8, 6), (8, 6)], (4,), "the output has 8 rows for a batch of 4"),
    "embeddings of other rows": (
        loss("info_nce"),
        [(8, 6), (32, 6)],
        None,
        r"their shapes differ: 'a' \[8, 6\], 'b' \[32, 6\]; name outputs of one shape",
    ),
    "embeddings of positions": (loss("triplet"), [(32, 6)] * 3, None, "the output has 32 rows for a batch of 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_pair_is_refused_with_both_shapes(case: str) -> None:
    of, outputs, labels, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check_axes(of, outputs, labels, names="abc"[: len(outputs)], size=8)


PAIRED: dict[str, tuple[LossConfig, Dims, Dims]] = {
    "a column": (loss("mse"), (8, 1), (8,)),
    "one channel": (loss("l1"), (8, 1, 5, 5), (8, 5, 5)),
    "a direction in front, as of an LSTM": (loss("mse"), (1, 8, 16), (8, 16)),
    "a file for one row without its batch": (loss("mse"), (3, 5), (1, 3, 5)),
    "one row": (loss("mse"), (1, 3), (1, 3)),
    "quantiles": (loss("quantile", quantiles=(0.1, 0.9)), (8, 5, 2), (8, 5)),
    "one quantile without an axis": (loss("quantile"), (8, 5), (8, 5)),
    "one quantile": (loss("quantile"), (8, 1), (8,)),
    "one box": (loss("giou"), (8, 4), (8, 4)),
    "boxes one after the other": (loss("giou"), (8, 12), (8, 12)),
    "boxes": (loss("giou"), (8, 100, 4), (8, 100, 4)),
    "a ctc": (loss("ctc"), (8, 20, 5), (8, 6)),
    "alike or not": (loss("cosine"), (8, 6), (8, 1)),
    "your own": (loss("file"), (32, 6), (8, 3)),
}


@pytest.mark.parametrize("case", PAIRED)
def test_what_pairs_is_not_complained_of(case: str) -> None:
    of, output, labels = PAIRED[case]
    check_axes(of, [output], labels, names="a")
    wanted = label_shape(of, output)
    assert of.name == "file" or wanted is not None

"""The axis of the classes is found from shapes, or refused; it is never guessed."""

from __future__ import annotations

import pytest

from onward.trainer.data.schema.class_axis import find_class_axis
from onward.trainer.data.schema.label_axes import Dims
from onward.trainer.errors import ConfigError

FOUND: dict[str, tuple[Dims, Dims, Dims | None, int]] = {
    "a classifier": ((4, 3), (4,), None, 1),
    "a classifier of one column of labels": ((4, 3), (4, 1), None, 1),
    "as many rows as classes": ((3, 3), (3,), None, 1),
    "one row without its batch": ((3,), (1,), None, 0),
    "flattened scores": ((20, 7), (4, 5), None, 1),
    "a language model": ((4, 8, 32), (4, 8), None, 2),
    "flattened labels": ((4, 8, 32), (32,), None, 2),
    "an image": ((2, 5, 7, 6), (2, 7, 6), None, 1),
    "an image with the classes last": ((2, 7, 6, 5), (2, 7, 6), None, 3),
    "masks with a channel": ((2, 5, 7, 6), (2, 1, 7, 6), None, 1),
    "flattened masks": ((2, 5, 7, 6), (2, 42), None, 1),
    "one number of scores": ((4, 1, 3), (4,), None, 2),
    "a length that the file fixes": ((2, 5, 5, 5), (2, 5, 5), (None, 5, None, None), 1),
    "a vocabulary that the file fixes": ((2, 8, 8), (2, 8), (None, None, 8), 2),
    "lengths that are not known": ((None, None, 32), (None, None), (None, None, 32), 2),
}


@pytest.mark.parametrize("case", FOUND)
def test_the_axis_whose_removal_gives_the_labels_is_that_of_the_classes(case: str) -> None:
    output, labels, declared, axis = FOUND[case]
    assert find_class_axis(output, labels, declared=declared) == axis
    assert find_class_axis(output, labels, given=axis) == axis
    assert find_class_axis(output, labels, given=axis - len(output)) == axis


@pytest.mark.parametrize("declared", [None, (2, 5, 5, 5), (None, None, None, None)])
def test_several_axes_that_fit_are_refused_with_all_of_them(declared: Dims | None) -> None:
    with pytest.raises(
        ConfigError, match=r"\[2, 5, 5, 5\] and the labels are \[2, 5, 5\]: .* axis 1, 2 or 3; .*axis = 3"
    ):
        find_class_axis((2, 5, 5, 5), (2, 5, 5), declared=declared)


def test_labels_that_fit_no_axis_are_refused_also_if_their_number_is_right() -> None:
    for given in (None, 3):
        with pytest.raises(ConfigError, match=r"the loss cannot be computed: .*\[2, 5, 7, 3\] .* \[2, 7, 5\]"):
            find_class_axis((2, 5, 7, 3), (2, 7, 5), given=given)
    with pytest.raises(ConfigError, match=r"loss.class_axis 4 is not an axis"):
        find_class_axis((2, 5, 7, 3), (2, 5, 7), given=4)

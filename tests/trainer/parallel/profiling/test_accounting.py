"""The time of a step is divided among labelled ranges without a rest: on a host, and on a GPU that runs behind it."""

from __future__ import annotations

from collections import Counter

import pytest

from onward.trainer.onnx_import.lowering.node_origins import Origin
from onward.trainer.parallel.profiling.accounting import Interval, Label, Timeline, account, divide
from onward.trainer.parallel.profiling.node_ranges import NodeRanges
from onward.trainer.parallel.profiling.recording import label_of

OTHER, IDLE = Label("other"), Label("idle")
CONV, RELU, STEP = Label("conv", "forward"), Label("relu", "forward"), Label("pipeline")
CONV_BACK = Label("conv", "backward")


def of(*ranges: tuple[int, int, Label]) -> list[Interval]:
    return [Interval(*each) for each in ranges]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], {OTHER: 100}),
        ([(10, 30, CONV)], {OTHER: 80, CONV: 20}),
        # nested: the innermost one counts, and the outer one has the rest
        ([(10, 90, STEP), (20, 40, CONV), (50, 60, RELU)], {OTHER: 20, STEP: 50, CONV: 20, RELU: 10}),
        # a recomputed forward pass inside of a backward pass
        ([(0, 100, STEP), (10, 80, RELU), (20, 50, CONV_BACK)], {STEP: 30, RELU: 40, CONV_BACK: 30}),
        # the same range again: its times add up
        ([(0, 10, CONV), (20, 30, CONV)], {OTHER: 80, CONV: 20}),
        # of two that began together the shorter one is inside, in whatever order they are given
        ([(10, 20, CONV), (10, 60, STEP)], {OTHER: 50, CONV: 10, STEP: 40}),
        ([(10, 60, STEP), (10, 20, CONV)], {OTHER: 50, CONV: 10, STEP: 40}),
        # beyond the step nothing counts
        ([(-50, 20, CONV), (90, 150, RELU)], {CONV: 20, OTHER: 70, RELU: 10}),
        # not nested, as kernels of two streams: the one that began last
        ([(0, 50, CONV), (30, 80, RELU)], {CONV: 30, RELU: 50, OTHER: 20}),
        # the first one is still running when the second has ended
        ([(0, 90, CONV), (30, 40, RELU)], {CONV: 80, RELU: 10, OTHER: 10}),
    ],
)
def test_each_instant_counts_for_the_range_that_began_last(
    ranges: list[tuple[int, int, Label]], expected: dict[Label, int]
) -> None:
    found = divide(of(*ranges), 0, 100, OTHER)
    assert +found == Counter(expected)
    assert found.total() == 100


def test_the_steps_are_those_of_their_thread_and_what_is_between_them_does_not_count() -> None:
    host = {7: of((0, 40, STEP), (10, 20, CONV), (45, 55, CONV), (60, 100, STEP)), 8: of((0, 100, RELU))}
    found = account(Timeline([(0, 40), (60, 100)], host, main=7), otherwise=OTHER, idle=IDLE)
    assert found == {STEP: 70, CONV: 10}


def test_on_a_gpu_kernels_count_for_the_range_that_launched_them_and_the_rest_is_idle() -> None:
    #   host, thread 1   |--- pipeline ---------------------|
    #                     |-conv-| |-relu-|
    #          thread 2                   |-conv, backward-|
    #   launches            a  b       c      d        and e, outside of every range
    #   GPU                   |  a   |  |b| |  c  | |  d  |   e
    host = {1: of((0, 60, STEP), (2, 10, CONV), (12, 20, RELU)), 2: of((22, 40, CONV_BACK))}
    launches = {1: (1, 3), 2: (1, 5), 3: (1, 15), 4: (2, 25), 5: (2, 70)}
    kernels = [(5, 15, 1), (17, 20, 2), (22, 30, 3), (35, 55, 4), (80, 85, 5)]
    found = account(Timeline([(0, 100)], host, 1, launches, kernels), otherwise=OTHER, idle=IDLE)
    assert found == {CONV: 13, RELU: 8, CONV_BACK: 20, OTHER: 5, IDLE: 54}
    assert found.total() == 100


def test_a_node_may_have_the_name_of_anything_else() -> None:
    ranges = NodeRanges()
    same = [Origin("y", "fc", "Gemm"), Origin("z", "fc", "Gemm")]
    others = [
        Origin(f"o{place}", name, "Add") for place, name in enumerate(("loss", "optimizer", "step 3", "aten::add"))
    ]
    names = [ranges.name_of(origin) for origin in (*same, *others)]
    assert names == ["fc", "fc -> z", "loss -> o0", "optimizer -> o1", "step 3 -> o2", "aten::add"]
    assert [ranges.name_of(origin) for origin in (*same, *others)] == names
    for origin, name in zip((*same, *others), names, strict=True):
        assert label_of(name, -1, ranges, is_range=True) == Label(origin.output, "forward")
    assert label_of("fc (recomputed)", -1, ranges, is_range=True) == Label("y", "backward")
    assert label_of("loss", -1, ranges, is_range=True) == Label("loss", "forward")
    assert label_of("optimizer", -1, ranges, is_range=True) == Label("optimizer")
    assert label_of("aten::add", -1, ranges, is_range=False) is None, "an operator of torch"

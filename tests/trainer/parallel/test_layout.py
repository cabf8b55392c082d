"""Ranks that divide layers have unequal shares, and yet they cut the graph alike and recompute the same units."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from onnx import parser

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.distributed.mesh import Coordinate
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.parallel.layout import Layout, build_layout, recompute_units
from onward.trainer.parallel.stage_weights import running_statistic_retention
from tests.support import graphs

HERE = Coordinate(0, 0, 0)
WIDTH = 16


def configured(**sections: Any) -> RunConfig:
    train = {"global_batch_size": 8, "gradient_accumulation_steps": 2, "num_steps": 1}
    return build_config({"model": {"path": "m.onnx"}, "data": {"source": "digits"}, "train": train, **sections})


def arranged(hidden: list[int], rank: int, config: RunConfig) -> Layout:
    module = to_module(graphs.residual_mlps(*hidden, width=WIDTH))
    select_trained(module)
    return build_layout(module, config, [torch.zeros(4, WIDTH)], rank=rank, group="tensor", autocast=nullcontext)


@pytest.mark.parametrize(
    ("hidden", "parallel"),
    [
        ([65, 16, 32, 64, 50, 17, 16, 17], {"tensor": 2, "pipeline": 2}),
        ([65, 16, 64, 64], {"tensor": 2, "units": 3}),
        ([7, 7, 7, 7, 9, 9, 9], {"tensor": 3, "pipeline": 2, "units": 2}),
    ],
)
def test_ranks_with_unequal_shares_cut_alike(hidden: list[int], parallel: dict[str, Any]) -> None:
    ranks = [arranged(hidden, rank, configured(parallel=parallel)) for rank in range(parallel["tensor"])]
    sizes = [[weight.placement.numel for weight in rank.weights(rank.stages, HERE)] for rank in ranks]
    assert sizes[0] != sizes[-1], "the shares are unequal, or nothing is tried here"
    assert max(sizes) == sizes[-1], "the last has the largest"
    nodes = [[[part.nodes for part in stage.chain.parts] for stage in rank.stages] for rank in ranks]
    assert all(each == nodes[-1] for each in nodes)


@pytest.mark.slow
def test_ranks_with_unequal_shares_recompute_the_same_units_for_the_same_memory() -> None:
    hidden = [65, 33, 17, 65, 33]
    found = set()
    for kib in range(24, 60, 2):
        config = configured(parallel={"tensor": 2, "units": 5, "memory_gib": kib / 2**20}, recompute={"mode": "whole"})
        chosen = []
        for rank in range(2):
            whole = arranged(hidden, rank, config)
            try:
                chosen.append(recompute_units(whole, whole.of(0, 1), config, [torch.zeros(4, WIDTH)], pipeline=0))
            except ConfigError as error:
                chosen.append(str(error))
        assert chosen[0] == chosen[1]
        found.add(str(chosen[0]))
    assert len(found) > 2, "memory decided"


def test_a_graph_of_which_nothing_can_be_divided_is_refused_with_the_reasons() -> None:
    config = configured(parallel={"tensor": 2})
    module = to_module(graphs.residual_mlps(width=WIDTH))
    select_trained(module)
    with pytest.raises(
        ConfigError, match=r"nothing of this graph .* parallel\.tensor = 2 ranks \(head: .*use parallel.data"
    ):
        build_layout(module, config, [torch.zeros(4, WIDTH)], rank=0, group="tensor", autocast=nullcontext)


def test_replicas_of_running_statistics_in_a_branch_are_refused() -> None:
    """Each replica takes the branch in other steps, so it is not known how to merge what they computed."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[N,2] x, bool b) => (float[N,2] y)
      <float[2] scale = {1,2}, float[2] bias = {1,0}, float[2] mean = {0,1}, float[2] variance = {1,2},
       float[2,2] w = {1,3,2,7}> {
        h = MatMul(x, w)
        y = If(b)<
          then_branch = t () => (float[N,2] p) { p = BatchNormalization(h, scale, bias, mean, variance) },
          else_branch = e () => (float[N,2] q) { q = Neg(h) }> }""")
    example = [torch.zeros(4, 2), torch.tensor(True)]

    def build(data: int, freeze: tuple[str, ...] = ()) -> Layout:
        module = to_module(model)
        select_trained(module, freeze=freeze)
        config = configured(parallel={"data": data})
        return build_layout(module, config, example, rank=0, group="", autocast=nullcontext)

    with pytest.raises(ConfigError, match=r"If holds a BatchNormalization.*\(mean, variance\).*parallel.data = 1"):
        build(data=2)
    build(data=1)
    build(data=2, freeze=("scale", "bias"))


def test_a_batch_norm_that_is_computed_when_the_graph_runs_keeps_what_its_momentum_says() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[N,2] x, int64[1] k) => (float[M,2] y)
      <float[2] scale = {1,2}, float[2] bias = {1,0}, float[2] mean = {0,1}, float[2] variance = {1,2},
       int64[1] zero = {0}> {
        h = NonZero(x)
        f = CastLike(h, x)
        t = Transpose(f)
        y = BatchNormalization<momentum = 0.75>(t, scale, bias, mean, variance) }""")
    module = to_module(model)
    layout = build_layout(
        module, configured(), [torch.zeros(4, 2), torch.zeros(1)], rank=0, group="", autocast=nullcontext
    )
    assert running_statistic_retention(layout.stages[0]) == {"mean": 0.75, "variance": 0.75}

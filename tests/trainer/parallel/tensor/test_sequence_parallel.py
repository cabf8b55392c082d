"""Sequence parallelism: what it divides, costs and refuses, and that resumed runs drop the same elements."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.collectives import (
    copy_to_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
    take_from_sequence,
)
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.parallel.planning.planner import plan
from onward.trainer.parallel.tensor.region_dropout import RankSeeded
from onward.trainer.parallel.tensor.regions import find_regions
from onward.trainer.parallel.tensor.rewrite import shard_regions
from onward.trainer.parallel.tensor.sequence_parallel import SequenceDivision, divide_sequence
from onward.trainer.run.directory import read_config
from tests.support import graphs, runs
from tests.support.ranks import run_ranks


def divided(proto: onnx.ModelProto, **settings: Any) -> tuple[ImportedGraph, SequenceDivision]:
    """The graph as rank 0 of 2 computes it, and what is divided along the sequence."""
    module = to_module(proto)
    shard_regions(module, find_regions(module, 2), rank=0, group="0")
    config = ParallelConfig(tensor=2, sequence_parallel=True, **settings)
    return module, divide_sequence(module, config, rank=0, group="0")


def calls(module: ImportedGraph, function: Callable[..., Any]) -> int:
    return sum(node.target is function for node in module.graph.nodes)


REGIONS = 4
"""Of two layers."""
MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], int, int]] = {
    # vectors whose gradients are summed, and regions whose values have no sequence: that of BERT's pooled token
    "GPT-2": (graphs.tiny_transformer, 12, 0),
    "BERT": (graphs.tiny_bert, 12, 1),
    "llama": (graphs.tiny_llama, 4, 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_between_the_regions_of_a_transformer_is_divided(name: str) -> None:
    build, num_vectors, num_others = MODELS[name]
    module, found = divided(build())
    assert calls(module, reduce_scatter_to_sequence) == REGIONS
    assert calls(module, reduce_from_region) == num_others
    # the first region reads the embeddings, which every rank has completely; the residual sum reads its part of them
    assert calls(module, take_from_sequence) == 1
    assert calls(module, copy_to_region) == 1 + num_others
    assert len(found.partial) == num_vectors
    # behind the last region the head reads all
    assert calls(module, gather_from_sequence) == REGIONS - 1 + 1
    norms = [node for node in module.graph.nodes if "norm" in str(node.target) and node.name in found.nodes]
    assert len(norms) == REGIONS


def test_before_adasum_each_vector_is_summed_in_the_backward_pass() -> None:
    module, found = divided(graphs.tiny_transformer(), reduction="adasum")
    assert calls(module, copy_to_region) == 1 + 12
    assert not found.partial


def test_dropout_between_regions_draws_by_rank_and_the_one_behind_the_embeddings_does_not() -> None:
    module, _ = divided(graphs.tiny_transformer(dropout=0.1))
    by_rows = [each for name, each in module.named_modules() if name.endswith("by_rows")]
    used = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
    alike = [name for name in used if isinstance(module.get_submodule(name), Dropout)]
    assert len(by_rows) == 4
    assert all(isinstance(each, RankSeeded) for each in by_rows)
    assert len(alike) == 1


def test_a_graph_without_anything_to_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nothing between the tensor-parallel layers .*sequence_parallel = false"):
        divided(graphs.tiny_resnet())


def config_of(folder: Path, *, length: int = 12, mode: str = "none", **parallel: Any) -> Any:
    run = runs.make_run(
        folder,
        graphs.tiny_transformer(),
        runs.tiny_text(40, length=length),
        train={"global_batch_size": 8, "num_steps": 2},
        recompute={"mode": mode},
        parallel=parallel,
    )
    return read_config(run)


@pytest.mark.slow
def test_the_plan_has_half_of_the_recomputed_units_inputs_less_of_other_activations_and_no_more_bytes(
    tmp_path: Path,
) -> None:
    def planned(mode: str, *, divided: bool) -> tuple[int, int]:
        found = plan(config_of(tmp_path / f"{mode} {divided}", mode=mode, tensor=2, units=2, sequence_parallel=divided))
        return found.memory[0].activations, sum(each.bytes for each in found.traffic if "activations" in each.what)

    for mode, most in (("none", 0.9), ("whole", 0.7)):
        (replicated, sent_before), (divided, sent) = planned(mode, divided=False), planned(mode, divided=True)
        assert divided < most * replicated, mode
        assert sent <= 1.2 * sent_before, mode


def test_a_length_that_the_ranks_do_not_divide_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"10 positions .* parallel.tensor = 3 ranks.* multiple of 3"):
        plan(config_of(tmp_path, length=10, tensor=3, sequence_parallel=True))


def test_one_rank_has_nothing_to_divide_a_sequence_over() -> None:
    with pytest.raises(ConfigError, match=r"parallel.tensor, which is 1"):
        build_config(
            {
                "model": {"path": "model.onnx"},
                "data": {"source": "digits"},
                "train": {"num_steps": 1},
                "parallel": {"sequence_parallel": True},
            }
        )


def collectives(mpi: MPIContext) -> list[Any]:
    """Each collective and its gradient, on two ranks; eager and compiled."""
    group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
    place = (1, mpi.rank, mpi.world_size, group)
    full = torch.arange(24.0).view(2, 4, 3)
    found = []
    for compiled in (False, True):
        for function, x, more in (
            (take_from_sequence, full, ()),
            (reduce_scatter_to_sequence, full * (1 + mpi.rank), ()),
            (gather_from_sequence, full.chunk(2, 1)[mpi.rank], ("sum",)),
            (gather_from_sequence, full.chunk(2, 1)[mpi.rank], ("same",)),
        ):
            x = x.clone().requires_grad_()

            def call(x: torch.Tensor, function: Any = function, more: Any = more) -> torch.Tensor:
                return function(x, *place, *more)  # type: ignore[no-any-return]

            y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(x)
            (y * torch.arange(float(y.numel())).view_as(y)).sum().backward()
            found.append([y.tolist(), x.grad.tolist()])  # type: ignore[union-attr]
    return found


@pytest.mark.slow
@pytest.mark.mpi
def test_the_collectives_and_their_gradients_are_those_of_whole_sequences() -> None:
    ranks = run_ranks(2, "tests.trainer.parallel.tensor.test_sequence_parallel:collectives")
    full = np.arange(24.0).reshape(2, 4, 3)
    of_part, of_full = np.arange(12.0).reshape(2, 2, 3), full
    for rank, found in enumerate(ranks):
        part = full[:, 2 * rank : 2 * rank + 2]
        both = np.concatenate([of_part, of_part], 1)
        own = of_full[:, 2 * rank : 2 * rank + 2]
        wanted = [[part, both], [3 * part, both], [full, 2 * own], [full, own]]
        assert found[:4] == [[y.tolist(), gradient.tolist()] for y, gradient in wanted]
        assert found[4:] == found[:4], "compiled"


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_killed_run_with_dropout_ends_with_the_same_bits(tmp_path: Path) -> None:
    def make(name: str) -> Any:
        return runs.make_run(
            tmp_path / name,
            graphs.tiny_transformer(dropout=0.1),
            runs.tiny_text(80),
            train={"global_batch_size": 8, "num_steps": 12, "seed": 5},
            checkpoint={"period": 4},
            recompute={"mode": "selective"},
            parallel={"tensor": 2, "sequence_parallel": True},
        )

    undisturbed, killed = make("undisturbed"), make("killed")
    runs.train_run(undisturbed, timeout_s=300)
    runs.train_until(killed, lambda event: event.step >= 6 and event.kind == "scalars", signal.SIGKILL, rank=0)
    runs.train_run(killed, timeout_s=300)
    runs.assert_equal_bits(runs.final_tensors(killed), runs.final_tensors(undisturbed))

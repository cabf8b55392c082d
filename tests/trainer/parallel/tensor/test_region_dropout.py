"""Dropout inside tensor-parallel regions, in the form that can be compiled: other elements on each rank."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.ops.random import StochasticDepth
from onward.trainer.onnx_import.passes.fused_attention import Attention
from onward.trainer.parallel.tensor.region_dropout import RankSeeded
from onward.trainer.parallel.tensor.regions import find_regions
from onward.trainer.parallel.tensor.rewrite import shard_regions
from tests.support import graphs, runs
from tests.support.ranks import run_ranks


def compiled_form(drawing: torch.nn.Module, rank: int, *values: Tensor, seed: int = 0) -> Tensor:
    """Compute what the compiler traces, without the compiler."""
    torch.manual_seed(seed)
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        return RankSeeded(drawing, rank).train()(*values)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_ranks_drop_the_configured_share_independently(ratio: float) -> None:
    x = torch.ones(256, 1024)
    masks = [compiled_form(Dropout(ratio), rank, x) for rank in range(4)]
    masks.append(compiled_form(Dropout(ratio), 0, x, seed=1))
    deviation = (ratio * (1 - ratio) / x.numel()) ** 0.5
    for mask in masks:
        assert torch.unique(mask).tolist() == [0.0, pytest.approx(1 / (1 - ratio))]
        dropped = (mask == 0).double()
        assert abs(dropped.mean() - ratio) < 5 * deviation
        assert (dropped.mean(0) - ratio).abs().max() < 6 * (ratio * (1 - ratio) / 256) ** 0.5
        assert (dropped.mean(1) - ratio).abs().max() < 6 * (ratio * (1 - ratio) / 1024) ** 0.5
    flat = [(mask == 0).flatten().double() - ratio for mask in masks]
    for shift in (0, 1, 7, 1024):
        for number, one in enumerate(flat):
            for other in flat[number:] if shift else flat[number + 1 :]:
                correlation = (one * other.roll(shift)).mean() / (ratio * (1 - ratio))
                assert abs(correlation) < 6 / x.numel() ** 0.5


def test_the_same_generator_state_drops_the_same_elements_and_it_advances_alike_on_all_ranks() -> None:
    x = torch.ones(8, 33)
    first, state = compiled_form(Dropout(0.3), 1, x, seed=5), torch.get_rng_state()
    assert torch.equal(first, compiled_form(Dropout(0.3), 1, x, seed=5))
    # rank 0 has fewer columns and draws other elements
    assert not torch.equal(first[:, :32], compiled_form(Dropout(0.3), 0, x[:, :32], seed=5))
    assert torch.equal(state, torch.get_rng_state())
    assert not compiled_form(Dropout(1.0), 0, x).any()


def test_bf16_values_are_scaled_by_the_exact_factor() -> None:
    x = torch.full((4096,), 3.0, dtype=torch.bfloat16)
    dropped = compiled_form(Dropout(0.1), 0, x)
    assert set(torch.unique(dropped).tolist()) == {0.0, float(torch.tensor(3.0 / 0.9).bfloat16())}


def test_stochastic_depth_drops_leading_indices() -> None:
    dropped = compiled_form(StochasticDepth(0.5, mask_dims=2), 1, torch.ones(8, 16, 3, 3))
    assert torch.equal(dropped, dropped[:, :, :1, :1].expand_as(dropped))
    assert 0 < int((dropped[:, :, 0, 0] == 0).sum()) < 128


@pytest.mark.parametrize("case", ["plain", "causal", "added mask", "bool mask", "grouped", "heads in the batch"])
def test_attention_with_explicit_weights_is_that_of_the_fused_kernel(case: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, requires_grad=True)
    key, value = (torch.randn(2, 2 if case == "grouped" else 4, 5, 8) for _ in range(2))
    if case == "heads in the batch":
        query, key, value = (x.detach().flatten(0, 1).requires_grad_() for x in (query, key, value))
    masks = {"added mask": [torch.randn(2, 1, 5, 5)], "bool mask": [torch.rand(2, 1, 5, 5) > 0.3]}.get(case, [])
    # a ratio so small that nothing is dropped
    attention = Attention(scale=0.3, causal=case == "causal", dropout=1e-9, grouped=case == "grouped")
    expected = attention.eval()(query, key, value, *masks)
    found = compiled_form(attention.train(), 0, query, key, value, *masks)
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected.square().sum(), query)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), query)[0], wanted)


def test_the_mean_over_many_attention_masks_is_the_attention_without() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 4, 8).expand(1000, 2, 4, 8) for _ in range(3))
    attention = Attention(scale=0.3, causal=False, dropout=0.2)
    draws = compiled_form(attention, 0, query, key, value)
    error = (draws.mean(0) - attention.eval()(query, key, value)[0]).abs()
    assert (error < 6 * draws.std(0) / 1000**0.5).all()


# -- on ranks


def compiled_with_dropout(mpi: MPIContext) -> dict[str, Any]:
    """Return outputs of a compiled GPT-2 with dropout: two steps, and the first again from the same state."""
    gpt2 = build_gpt2(vocab_size=32, sequence_length=16, num_layers=1, num_heads=2, width=32, dropout=0.1)
    module = to_module(gpt2).train()
    group = dist.group.WORLD
    assert group is not None
    found = find_regions(module, mpi.world_size)
    shard_regions(module, found, rank=mpi.rank, group=group.group_name)
    drawing = [child for child in module.modules() if isinstance(child, RankSeeded)]
    compiled = torch.compile(module, fullgraph=True, backend="eager")  # traces as for inductor, in less time
    ids = torch.arange(32).view(2, 16)
    torch.manual_seed(3)
    state, outputs = torch.get_rng_state(), []
    for _ in range(2):
        outputs.append(compiled(ids))
    torch.set_rng_state(state)
    again = compiled(ids)
    again.square().mean().backward()
    return {
        "drawing": len(drawing),
        "outputs": [output.flatten().tolist() for output in outputs],
        "repeated": torch.equal(again, outputs[0]),
        "finite": all(bool(weight.grad.isfinite().all()) for weight in module.parameters() if weight.grad is not None),
    }


@pytest.mark.slow
@pytest.mark.mpi
def test_tensor_parallel_ranks_compile_dropout_into_one_graph_and_drop_the_same_elements_outside_of_regions() -> None:
    first, second = run_ranks(2, "tests.trainer.parallel.tensor.test_region_dropout:compiled_with_dropout")
    assert first["drawing"] == 1  # the attention
    assert first["outputs"] == second["outputs"]  # else masks outside of regions would differ
    assert first["outputs"][0] != first["outputs"][1]
    assert first["repeated"]
    assert second["repeated"]
    assert first["finite"]
    assert second["finite"]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_compiled_on_two_tensor_parallel_ranks_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    def make(name: str) -> Any:
        return runs.make_run(
            tmp_path / name,
            graphs.tiny_transformer(dropout=0.1),
            runs.tiny_text(80),
            train={"global_batch_size": 8, "num_steps": 12, "evaluation_period": 10, "seed": 5},
            checkpoint={"period": 4},
            graph={"compile": True},
            parallel={"tensor": 2},
            launch={"heartbeat_timeout_s": 300},
        )

    undisturbed, killed = make("undisturbed"), make("killed")
    runs.train_run(undisturbed, timeout_s=400)
    runs.train_until(killed, lambda event: event.step >= 6 and event.kind == "scalars", signal.SIGKILL, rank=0)
    runs.train_run(killed, timeout_s=400)
    runs.assert_equal_bits(runs.final_tensors(killed), runs.final_tensors(undisturbed))

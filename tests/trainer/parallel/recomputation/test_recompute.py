"""Recomputation leaves every gradient bit for bit the same, keeps less, and in mode selective repeats no product."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import onnx
import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.ops.random import RandomNode, StochasticDepth
from onward.trainer.onnx_import.passes.fused_attention import Attention
from onward.trainer.parallel.cost import estimate_costs
from onward.trainer.parallel.pipeline.balance import choose_cuts, node_work
from onward.trainer.parallel.pipeline.cut_points import find_cut_points
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import Chain, Part, build_stages
from onward.trainer.parallel.recomputation.recompute import Mode, _keeps_result, recompute
from onward.trainer.parallel.recomputation.recompute_choice import UnitCost, unit_costs
from tests.support.graphs import MODELS, feed, tiny_transformer
from tests.support.ranks import run_ranks

MODES: tuple[Mode, ...] = ("whole", "selective")
CASTS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


# -- chains


def whole(model: onnx.ModelProto) -> Chain:
    """A model as a chain of one unit."""
    module = to_module(model)
    return build_stages(module, [split(module, ())], {})[0].chain


def in_units(model: onnx.ModelProto, number: int, inputs: Sequence[Tensor]) -> tuple[Chain, list[UnitCost]]:
    """Return a model as a chain of at most so many units, and the cost of each."""
    module = to_module(model)
    found = estimate_costs(module, inputs)
    narrow = [point for point in find_cut_points(module.graph, found) if point.is_narrow]
    points = choose_cuts(narrow, node_work(module.graph, found), min(number, len(narrow) + 1))
    stage = build_stages(module, [split(module, points)], found)[0]
    return stage.chain, unit_costs(stage.chain.parts, found)


class Block(nn.Module):
    """Everything whose repetition could be noticed: batch normalisation and every kind of random number."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(2 * width, width) / 4)
        self.scale, self.shift = nn.Parameter(torch.ones(2 * width)), nn.Parameter(torch.zeros(2 * width))
        self.register_buffer("mean", torch.zeros(2 * width))
        self.register_buffer("variance", torch.ones(2 * width))
        self.register_buffer("constant", torch.ones(()), persistent=False)
        self.norm, self.dropout, self.depth = BatchNorm(0.1, 1e-5), Dropout(0.2, with_mask=True), StochasticDepth(0.7)
        self.attention = Attention(scale=0.5, causal=False, dropout=0.1)
        self.noise = RandomNode("normal", torch.float32, 0.0, 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: [batch, width]."""
        h = self.norm(x @ self.up, self.scale, self.shift, self.mean, self.variance)
        h, _ = self.dropout(F.gelu(h))
        h = (h.float() @ self.down) + self.noise(self.constant, x)
        heads = h.reshape(1, 4, -1, 4)
        return (x + self.depth(self.attention(heads, heads, heads).reshape(x.shape)) * self.constant,)


def blocks(number: int = 3, *, of: Callable[[], nn.Module] = Block) -> Chain:
    torch.manual_seed(0)
    names = [f"x{i}" for i in range(number + 1)]
    parts = [Part(of(), (before,), (after,)) for before, after in itertools.pairwise(names)]
    return Chain(parts, input_names=names[:1], output_names=names[-1:])


def inputs_of(model: onnx.ModelProto, batch: int = 5) -> list[Tensor]:
    return [torch.from_numpy(array) for array in feed(model, batch).values()]


def learn(chain: Chain, batches: Sequence[Sequence[Tensor]], cast: torch.dtype | None = None) -> list[Tensor]:
    """Outputs, gradients and running statistics after the forward passes of all batches and then the backward ones."""
    torch.manual_seed(3)
    chain.train()
    results = []
    for inputs in batches:
        with torch.autocast("cpu", dtype=cast) if cast else nullcontext():
            results.append(chain(*inputs))
    for outputs in results:
        losses = [output.float().square().sum() for output in outputs if output.requires_grad]
        torch.stack(losses).sum().backward()
    assert torch.rand(()) is not None
    gradients = [p.grad if p.grad is not None else torch.zeros(0) for p in chain.parameters()]
    return [*(x.detach() for outputs in results for x in outputs), *gradients, *chain.buffers(), torch.rand(3)]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- the same bits


QUICK = ("tiny_resnet", "tiny_bert", "dropout")
GRAPHS = [
    pytest.param(name, cast, marks=() if name in QUICK and cast != "fp16" else pytest.mark.slow)
    for name in (*MODELS, "dropout")
    for cast in CASTS
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "cast"), GRAPHS)
def test_gradients_and_statistics_of_graphs_are_the_same_bits(name: str, cast: str, mode: Mode) -> None:
    model = MODELS[name]() if name in MODELS else tiny_transformer(dropout=0.2)
    batches = [inputs_of(model), inputs_of(model, batch=3)]
    again, _ = in_units(model, 3, batches[0])
    recompute(again, mode, range(len(again.units)))
    assert equal(learn(whole(model), batches, CASTS[cast]), learn(again, batches, CASTS[cast]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("chosen", [[1], [0, 1, 2]])
def test_random_numbers_and_running_statistics_are_those_without_recomputation(
    chosen: list[int], cast: str, mode: Mode
) -> None:
    chain, again = blocks(), blocks()
    recompute(again, mode, chosen)
    batches = [[torch.randn(8, 16)], [torch.randn(6, 16)], [torch.randn(8, 16)]]
    first, second = learn(chain, batches, CASTS[cast]), learn(again, batches, CASTS[cast])
    assert equal(first, second)
    assert not torch.equal(chain.units[0].mean, torch.zeros(32)), "statistics are learned, once"


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_between_forward_and_backward_changes_nothing(mode: Mode) -> None:
    def gradients(chain: Chain) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(8, 16)
        loss = chain.train()(x)[0].square().sum()
        chain.eval()
        with torch.no_grad():
            chain(x)
        loss.backward()
        assert not any(unit.training for unit in chain.units)
        return [p.grad for p in chain.parameters() if p.grad is not None] + list(chain.buffers())

    again = blocks()
    recompute(again, mode, [0, 1, 2])
    assert equal(gradients(blocks()), gradients(again))


@pytest.mark.parametrize("mode", MODES)
def test_a_single_sample_is_normalised_with_the_statistics_of_its_forward_pass(mode: Mode) -> None:
    """A batch of one has no statistics. A later micro-batch has updated the running ones before the unit runs again."""
    one, two = torch.randn(1, 16), torch.randn(8, 16)
    chain, again = blocks(1), blocks(1)
    recompute(again, mode, [0])
    expected = learn(chain, [[one]])[1:5]
    torch.manual_seed(3)
    loss = again.train()(one)[0].square().sum()
    again(two)
    loss.backward()
    assert equal([p.grad for p in again.parameters() if p.grad is not None], expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_autocast_had_cached_is_cast_again(mode: Mode) -> None:
    """Autocast caches casts while its context is open: over two micro-batches here, but not in the backward pass."""

    def gradients(chain: Chain) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [chain(torch.randn(8, 16))[0] for _ in range(2)]
        torch.stack([output.float().square().sum() for output in outputs]).sum().backward()
        return [p.grad for p in chain.parameters() if p.grad is not None]

    again = blocks()
    recompute(again, mode, [0, 1, 2])
    assert equal(gradients(blocks()), gradients(again))


@pytest.mark.parametrize("mode", MODES)
def test_a_unit_whose_backward_pass_runs_in_two_parts_is_recomputed_in_each(mode: Mode) -> None:
    def gradients(chain: Chain) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(8, 16, requires_grad=True)
        loss = chain(x)[0].square().sum()
        (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        return [of_input, *torch.autograd.grad(loss, list(chain.parameters())), *chain.buffers()]

    again = blocks()
    recompute(again, mode, [0, 1, 2])
    assert equal(gradients(blocks()), gradients(again))


class Mixed(nn.Module):
    """Reads integers, booleans and tensors without gradient, and returns some of them unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 8))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, ids: Tensor, mask: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.where(mask[:, None], F.embedding(ids, self.table) @ self.frozen, x)
        return h.tanh(), ids + 1, mask, h.argmax(1), x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("needs", [True, False])
def test_integers_booleans_and_tensors_without_gradient_pass_through(needs: bool, mode: Mode) -> None:
    ids, mask, x = torch.tensor([0, 3, 4]), torch.tensor([True, False, True]), torch.randn(3, 8)
    torch.manual_seed(0)
    part = Part(Mixed(), ("ids", "mask", "x"), ("h", "next", "same", "most", "y"))
    chain = Chain([part], input_names=part.input_names, output_names=part.output_names)
    again = copy.deepcopy(chain)
    recompute(again, mode, [0])
    for one in (chain, again):
        for parameter in one.parameters():
            parameter.requires_grad_(needs and parameter.shape[0] == 5)
    batches = [[ids, mask, x.clone().requires_grad_(needs)]] * 2
    if needs:
        assert equal(learn(chain, batches), learn(again, batches))
    else:
        assert equal(chain(*batches[0]), again(*batches[0]))


def test_frozen_normalisation_keeps_its_statistics() -> None:
    chain, again = blocks(), blocks()
    recompute(again, "whole", [0, 1, 2])
    for module in (*chain.modules(), *again.modules()):
        if isinstance(module, BatchNorm):
            module.frozen = True
    batches = [[torch.randn(8, 16)], [torch.randn(8, 16)]]
    assert equal(learn(chain, batches), learn(again, batches))
    assert torch.equal(again.units[0].unit.mean, torch.zeros(32))  # type: ignore[union-attr]


# -- what it saves, what it costs


class Layers(nn.Module):
    """A product and pointwise operators, for which autograd keeps eight tensors of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (F.layer_norm(F.gelu(F.silu((x @ self.weight).tanh().sigmoid().exp())), (32,)),)


def live_bytes(chain: Chain, x: Tensor) -> int:
    """Return the bytes that a forward pass has allocated and not freed, without its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        kept = [output.grad_fn for output in chain(x)]
    assert None not in kept
    return int(sum(event.self_cpu_memory_usage for event in record.key_averages()))


def test_selective_keeps_inputs_and_products_and_whole_keeps_inputs_alone() -> None:
    x = torch.randn(512, 32)
    found = {}
    for mode in ("none", *MODES):
        chain = blocks(4, of=Layers)
        recompute(chain, mode, range(4))  # type: ignore[arg-type]
        chain(x)
        found[mode] = live_bytes(chain, x)
    states = 4 * 5056 + 10_000  # of the random number generator, and small change
    assert found["none"] > 4 * 5 * x.nbytes
    assert 3 * x.nbytes <= found["whole"] < 3 * x.nbytes + states
    assert 7 * x.nbytes <= found["selective"] < 7 * x.nbytes + states


@pytest.mark.slow
def test_the_estimated_bytes_of_each_mode_are_those_that_it_keeps() -> None:
    model = build_gpt2(vocab_size=64, sequence_length=64, num_layers=4, num_heads=2, width=64, dropout=0.0)
    inputs = [torch.randint(64, (8, 64))]
    for mode in ("none", *MODES):
        chain, takes = in_units(model, 4, inputs)
        assert len(takes) == 4
        recompute(chain, mode, range(4))  # type: ignore[arg-type]
        chain(*inputs)
        expected = sum(unit.stored_bytes(mode) for unit in takes)  # type: ignore[arg-type]
        assert live_bytes(chain, inputs[0]) == pytest.approx(expected, rel=0.02, abs=4 * 5056)


def flops(chain: Chain, batches: Sequence[Sequence[Tensor]]) -> int:
    with FlopCounterMode(display=False) as counter:
        learn(chain, batches)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_bert", "dropout"])
def test_selective_computes_no_product_and_no_convolution_twice(name: str) -> None:
    model = MODELS[name]() if name in MODELS else tiny_transformer(dropout=0.2)
    counts = {}
    for mode in ("none", *MODES):
        chain = whole(model)
        recompute(chain, mode, [0])  # type: ignore[arg-type]
        counts[mode] = flops(chain, [inputs_of(model)])
    assert counts["selective"] == counts["none"]
    assert 1.3 * counts["none"] < counts["whole"] < 1.5 * counts["none"]


@pytest.mark.parametrize("mode", MODES)
def test_outside_training_the_unit_is_called_directly(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "onward.trainer.parallel.recomputation.recompute.checkpoint", lambda *_, **__: pytest.fail("it was recomputed")
    )
    chain = blocks(1, of=Layers)
    recompute(chain, mode, [0])
    x = torch.randn(4, 32)
    chain.eval()(x)[0].sum().backward()
    with torch.no_grad():
        chain.train()(x)


@pytest.mark.parametrize(
    ("func", "arguments", "kept"),
    [
        (torch.ops.aten.mm.default, (), True),
        (torch.ops.aten.convolution.default, (), True),
        (torch.ops.aten.add.Tensor, (), False),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, (0, 0, 0, 0.0, True), True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, (0, 0, 0, 0.1, True), False),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, (0, 0, 0, None, True, 0.1), False),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (0, 0, 0), True),
        (torch.ops._c10d_functional.all_reduce.default, (), True),
        (torch.ops._c10d_functional.wait_tensor.default, (), False),
    ],
)
def test_products_and_collectives_are_kept_but_not_kernels_that_draw_random_numbers(
    func: Any, arguments: Any, kept: bool
) -> None:
    """If the second pass skipped attention with dropout, the next Dropout would draw its random numbers."""
    assert _keeps_result(func, arguments, {}) == kept


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return ((x @ x.T).mul_(2).tanh(),)


def test_writing_over_a_kept_product_is_refused() -> None:
    chain = blocks(1, of=InPlace)
    recompute(chain, "selective", [0])
    with pytest.raises(UnsupportedModel, match=r"product of shape \[4, 4\] .*mul_.*'whole'"):
        chain(torch.randn(4, 4, requires_grad=True))


def test_weights_keep_their_paths_and_names_inside_the_unit() -> None:
    chain = whole(MODELS["tiny_mlp"]())
    before = {id(parameter) for parameter in chain.parameters()}
    recompute(chain, "whole", [0])
    found = [module for module in chain.modules() if hasattr(module, "onnx_names")]
    assert [sorted(module.onnx_names.values()) for module in found] == [  # type: ignore[operator]
        ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    ]
    assert {id(parameter) for parameter in chain.parameters()} == before
    assert {path for path, _ in found[0].named_parameters()} == set(found[0].onnx_names)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # inductor's own
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tiny_resnet", "dropout"])
def test_compiled_units_are_recomputed_too(name: str, mode: Mode) -> None:
    # or each code that the compiler makes draws masks of its own
    with torch._inductor.config.patch(fallback_random=True):
        assert_recomputed_when_compiled(name, mode)


def assert_recomputed_when_compiled(name: str, mode: Mode) -> None:
    model = MODELS[name]() if name in MODELS else tiny_transformer(dropout=0.2)
    torch.compiler.reset()
    chain = whole(model)
    again = copy.deepcopy(chain)
    recompute(again, mode, [0])
    for one in (chain, again):
        one.units[0] = torch.compile(one.units[0], dynamic=True, fullgraph=True)  # type: ignore[assignment]
    batches = [inputs_of(model), inputs_of(model, batch=3)]
    for one, other in zip(learn(chain, batches), learn(again, batches), strict=True):
        torch.testing.assert_close(one, other)


# -- on ranks


def on_two_ranks(mpi: MPIContext) -> dict[str, Any]:
    """Return {case: whether the gradients are bit for bit equal, or the number of collectives}."""
    found: dict[str, Any] = {}
    for mode in MODES:
        found[f"sharded {mode}"] = equal(sharded("none"), sharded(mode))
        found[f"pipeline {mode}"] = equal(pipeline(mpi, "none"), pipeline(mpi, mode))
    results = {mode: divided(mode) for mode in ("none", *MODES)}
    for mode, (tensors, sums) in results.items():
        found[f"divided {mode}"] = equal(results["none"][0], tensors)
        found[f"sums {mode}"] = sums
    return found


def sharded(mode: Mode) -> list[Tensor]:
    """Gradients under FSDP2, one group a unit, weights gathered again for the backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    chain = blocks()
    recompute(chain, mode, [0, 2])
    mesh = init_device_mesh("cpu", (2,))
    for unit in chain.units:
        fully_shard(unit, mesh=mesh)
    fully_shard(chain, mesh=mesh)
    torch.manual_seed(5)
    for _ in range(2):
        chain(torch.randn(8, 16))[0].square().sum().backward()
    gradients = [parameter.grad for parameter in chain.parameters()]
    return [gradient.to_local() for gradient in gradients if gradient is not None] + list(chain.buffers())  # type: ignore[attr-defined]


def pipeline(mpi: MPIContext, mode: Mode) -> list[Tensor]:
    """Gradients of this rank's stage after 1F1B over four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class Single(nn.Module):
        def __init__(self, chain: Chain) -> None:
            super().__init__()
            self.chain = chain

        def forward(self, x: Tensor) -> Tensor:
            return self.chain(x)[0]  # type: ignore[no-any-return]

    chain = blocks()
    recompute(chain, mode, [0, 1, 2])
    example = torch.empty(8, 16, requires_grad=True)
    given = example.detach() if mpi.rank == 0 else example
    stage = PipelineStage(Single(chain), mpi.rank, 2, mpi.device, input_args=(given,), output_args=(example,))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, _: y.square().sum(), scale_grads=False)
    torch.manual_seed(5)
    x = torch.randn(32, 16)
    schedule.step(*([x] if mpi.rank == 0 else []), **({} if mpi.rank == 0 else {"target": x}))
    return [parameter.grad for parameter in chain.parameters() if parameter.grad is not None] + list(chain.buffers())


class Region(nn.Module):
    """A column-parallel and a row-parallel product, with all-reduces between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.rows = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8, 16) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        import torch.distributed as dist

        from onward.trainer.distributed.collectives import copy_to_region, reduce_from_region

        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        h = reduce_from_region(F.gelu(copy_to_region(x, group) @ self.columns) @ self.rows, group)
        return (F.dropout(h, 0.2).tanh() + x,)


def divided(mode: Mode) -> tuple[list[Tensor], int]:
    """Return gradients of a tensor-parallel region, and the number of all-reduces of a forward and backward pass."""
    from torch.distributed.tensor.debug import CommDebugMode

    chain = blocks(2, of=Region)
    recompute(chain, mode, [0, 1])
    with CommDebugMode() as counter:
        results = learn(chain, [[torch.full((4, 16), 0.5, requires_grad=True)]])
    return results, counter.get_total_counts()


@pytest.mark.mpi
def test_under_sharding_pipelines_and_tensor_parallelism_the_bits_are_the_same() -> None:
    for found in run_ranks(2, "tests.trainer.parallel.recomputation.test_recompute:on_two_ranks"):
        sums = {mode: found.pop(f"sums {mode}") for mode in ("none", *MODES)}
        assert all(found.values()), found
        assert sums == {"none": 4, "selective": 4, "whole": 6}, "2 regions: forward, backward, and forward again"

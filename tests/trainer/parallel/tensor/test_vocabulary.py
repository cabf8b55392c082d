"""Which tables and heads are sharded, why others are not, and that real ranks compute what one does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from onward.trainer.config.sections.model import LoraConfig, ModelConfig
from onward.trainer.distributed.mesh import new_group
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, share, slices
from onward.trainer.model.adapters import add_adapters
from onward.trainer.model.losses.loss import Loss, Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.ops.gather import gather_rows
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.parallel.tensor.vocabulary import (
    FIRST_REGION,
    VocabularySharding,
    find_vocabulary_sharding,
    lookup_local_rows,
    shard_vocabulary,
)
from tests.support import graphs, zoo
from tests.support.losses import loss_of
from tests.support.ranks import run_ranks

# -- graphs that the models do not have


def language_model(*, words: int = 33, head: str = "tied", after: str = "", width: int = 8) -> onnx.ModelProto:
    """`ids` [batch, sequence <= 40] -> `logits` [batch, sequence, words]; also `hidden`, from which they are computed.

    head: tied, tied to a table that is stored transposed, or of its own, with a bias, over flattened targets. after:
    what becomes of the logits.
    """
    g = GraphWriter("language_model")
    ids = g.input("ids", ("batch", "sequence"), TensorProto.INT64)
    turned = head == "turned"
    table = g.weight("wte", g.normal(0.5, *((width, words) if turned else (words, width))))
    x = g.op("Gather", g.op("Transpose", table, perm=[1, 0]) if turned else table, ids)
    zero, one = (g.weight(f"index_{number}", np.array(number)) for number in (0, 1))
    places = g.op("Range", zero, g.op("Gather", g.op("Shape", ids), one), one)
    x = g.op("Add", x, g.op("Gather", g.weight("wpe", g.normal(0.5, 40, width)), places))
    x = g.op("Tanh", g.op("MatMul", x, g.weight("hidden.weight", g.normal(0.5, width, width))), outputs="hidden")
    if head == "own":
        own = g.weight("head.weight", g.normal(0.5, words, width)), g.weight("head.bias", g.normal(0.5, words))
        y = g.op("Gemm", g.op("Flatten", x, axis=2), *own, transB=1)
    else:
        y = g.op("MatMul", x, table if turned else g.op("Transpose", table, perm=[1, 0]))
    g.op("Identity", AFTER[after](g, y, words), outputs="logits")
    kind = TensorProto.DOUBLE if after == "capped" else TensorProto.FLOAT
    g.output("logits", ("targets", words) if head == "own" else ("first", "second", words), kind)
    g.output("hidden", ("batch", "sequence", width))
    if after in ("read", "twice"):
        g.op("Softmax" if after == "read" else "Identity", "logits", outputs="other")
        g.output("other", ("first", "second", words))
    return g.model()


def _capped(g: GraphWriter, y: str, words: int) -> str:
    ranks = g.op("Cast", g.weight("ranks", np.arange(words)[None, None]), to=TensorProto.FLOAT)
    y = g.op("Sub", g.op("Add", y, g.weight("shift", g.normal(0.5, words))), ranks)
    cap = g.weight("cap", 3.0)
    y = g.op("Mul", g.op("Tanh", g.op("Div", y, cap)), cap)
    return g.op("Transpose", g.op("Cast", y, to=TensorProto.DOUBLE), perm=[1, 0, 2])


AFTER: dict[str, Callable[[GraphWriter, str, int], str]] = {
    "": lambda g, y, words: y,
    "read": lambda g, y, words: y,
    "twice": lambda g, y, words: y,
    "capped": _capped,
    "lifted": lambda g, y, words: g.op("Add", y, g.weight("level", g.normal(1.0, 1))),
    "placed": lambda g, y, words: g.op("Add", y, g.weight("level", g.normal(1.0, 6, 1))),
    "softened": lambda g, y, words: g.op("Softmax", y),
    "decayed": lambda g, y, words: g.op("Add", y, g.op("ReduceMean", "wte", keepdims=0)),
}


def config(**settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"path": "-", **settings})


def plan(model: onnx.ModelProto, size: int = 2, **settings: Any) -> VocabularySharding:
    return find_vocabulary_sharding(to_module(model), size, [loss_of(config(**settings))])


# -- the plan


def test_a_tied_table_is_sharded_at_both_ends_and_positions_are_replicated() -> None:
    found = plan(graphs.tiny_transformer())
    assert found.weights == ("transformer.wte.weight",)
    assert found.lookups == ("gather_rows",)
    assert found.head is not None
    assert found.head.product == "matmul_12"
    rule = "gather_rows_1 looks up positions in it, not vocabulary entries: every rank needs the same few rows"
    assert found.replicated == (("transformer.wpe.weight", rule),)


def test_an_untied_head_is_sharded_with_its_bias_and_so_is_the_table() -> None:
    assert plan(language_model(head="own")).weights == ("head.weight", "head.bias", "wte")
    assert plan(graphs.tiny_llama()).weights == ("lm_head.weight", "embed.weight")


@pytest.mark.parametrize("fuse", [True, False])
def test_the_sharding_of_an_unfused_graph_is_that_of_the_fused_one(fuse: bool) -> None:
    module = to_module(language_model(head="own"), fuse=fuse)
    assert find_vocabulary_sharding(module, 3, [loss_of(config())]).weights == ("head.weight", "head.bias", "wte")


def test_elementwise_calls_may_follow_the_head() -> None:
    found = plan(language_model(after="capped"))
    assert found.head is not None
    assert found.weights == ("wte", "shift")
    assert len(found.head.constants) == 1


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "the loss is no cross-entropy": ({}, {"loss": "mse"}, "wte", "the loss is mse: only cross_entropy"),
    "another node reads the logits": ({"after": "read"}, {}, "wte", "softmax reads its output, too"),
    "they are two outputs": ({"after": "twice"}, {}, "wte", "its output is 2 of the graph's outputs"),
    "they meet another weight": (
        {"after": "lifted"},
        {},
        "wte",
        "its output with level, which is not sharded by vocabulary entries",
    ),
    # an Add of a fixed length is a module, of which nothing is known
    "a module follows": ({"after": "placed"}, {}, "wte", "add_10 comes between its output and the loss"),
    "a softmax follows": ({"after": "softened"}, {}, "wte", "softmax comes between its output and the loss"),
    "the table is read otherwise": ({"after": "decayed"}, {}, "wte", "reads wte, too, and needs all of it"),
    "it is small": ({"words": 7}, {}, "wte", "its 7 vocabulary entries are fewer than its width of 8"),
    "the loss reads another output": ({}, {"output": "hidden"}, "wte", "matmul_1 reads wte, too, and needs all of it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tied_table_is_replicated_at_both_ends_with_a_reason(case: str) -> None:
    made, settings, name, rule = REFUSED[case]
    found = plan(language_model(**made), **settings)
    assert found.head is None
    assert name not in found.weights
    assert rule in dict(found.replicated)[name]
    assert found.classes(0, "tensor") is None


def test_a_table_is_sharded_although_the_head_is_not() -> None:
    found = plan(language_model(head="own"), loss="mse")
    assert found.weights == ("wte",)
    assert dict(found.replicated)["head.weight"].startswith("the loss is mse")


def test_a_weight_that_a_region_shards_is_left_to_it() -> None:
    found = find_vocabulary_sharding(
        to_module(language_model(head="own")), 2, [loss_of(config())], taken=("head.weight",)
    )
    assert found.weights == ("wte",)
    assert dict(found.replicated)["head.weight"] == "head.weight is sharded with other layers already"


def test_a_head_with_an_adapter_is_replicated() -> None:
    module = to_module(language_model(head="own"))
    add_adapters(module, LoraConfig(weights=("head.weight",), rank=2), seed=0)
    found = find_vocabulary_sharding(module, 2, [loss_of(config())])
    assert found.head is None
    assert found.weights == ("wte",)


def test_a_graph_without_a_vocabulary_has_nothing_to_shard() -> None:
    assert plan(graphs.tiny_mlp(), loss="mse").weights == ()
    assert plan(graphs.tiny_transformer(), 1) == VocabularySharding(1)
    assert dict(plan(language_model(), 34).replicated)["wte"] == "its 33 vocabulary entries are fewer than 34 ranks"
    classes = dict(plan(graphs.tiny_conv_net()).replicated)["classifier.weight"]
    assert classes == "its 4 vocabulary entries are fewer than its width of 128: it would send more than it saves"


def test_nodes_where_no_stage_may_be_cut_are_marked() -> None:
    module = to_module(graphs.tiny_transformer())
    shard_vocabulary(module, find_vocabulary_sharding(module, 2, [loss_of(config())]), rank=1, group="tensor")
    inside = {node.name: node.meta["tensor_parallel"] for node in module.graph.nodes if "tensor_parallel" in node.meta}
    assert inside == {"gather_rows": FIRST_REGION, "copy_to_region": FIRST_REGION + 1, "matmul_12": FIRST_REGION + 1}


# -- looking rows up


@pytest.mark.parametrize("size", [2, 3])
def test_the_rows_of_all_ranks_add_up_to_those_of_the_table(size: int) -> None:
    table = torch.randn(50257, 3)
    indices = torch.cat((torch.randint(-50257, 50257, (2, 50)), torch.tensor([[0, -1], [50256, -50257]])), 1)
    total = torch.zeros(2, 52, 3)
    for start, stop in (share(50257, rank, size) for rank in range(size)):
        total += lookup_local_rows(table[start:stop], indices, start, 50257)
    torch.testing.assert_close(total, gather_rows(table, indices), rtol=0, atol=0)


def test_an_index_out_of_range_is_an_error_on_the_first_or_last_rank() -> None:
    table = torch.randn(10, 2)
    for index, last in ((10, True), (-11, False)):
        indices = torch.tensor([index])
        with pytest.raises(IndexError):
            gather_rows(table, indices)
        with pytest.raises(IndexError):
            lookup_local_rows(table[5:] if last else table[:5], indices, 5 if last else 0, 10)


# -- real ranks

CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "turned": {"head": "turned"},
    "own": {"head": "own"},
    "unfused": {"head": "own", "fuse": False},
    "capped": {"after": "capped"},
    "frozen": {"freeze": ("wte",)},
    "table alone": {"head": "own", "loss": "mse"},
    "probabilities": {"head": "own", "soft": True},
}
BATCH, LENGTH, WORDS = 4, 6, 33


@pytest.mark.slow
def test_real_ranks_with_sharded_tables_heads_and_loss_compute_what_one_rank_does() -> None:
    counts = run_ranks(3, "tests.trainer.parallel.tensor.test_vocabulary:trains_alike")
    assert counts[0] == counts[1]
    for name, counted in counts[0].items():
        # look-ups forward, the loss's maximum and sums, the head backward
        assert counted == ([1, 0, 0] if "table alone" in name else [1, 2, 1]), name


def trains_alike(mpi: MPIContext) -> dict[str, list[int]]:
    """Every case over 2 and 3 ranks, against the whole on each rank; the numbers of collectives of one step."""
    counts = {}
    for size in (2, 3):
        group = new_group(range(size), timeout_s=30)
        if group is None:
            continue
        for name, case in CASES.items():
            counts[f"{name} over {size}"] = _train_both(case, mpi.rank, size, group.group_name)
        _evaluates_alike(mpi.rank, size, group.group_name)
        _computes_in_other_ways(mpi.rank, size, group.group_name)
    _same_metrics(mpi, group.group_name if group else "")
    return counts


def _train_both(case: dict[str, Any], rank: int, size: int, group: str) -> list[int]:
    whole, mine, losses, placements = _both(case, rank, size, group)
    counts: list[int] = []
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (whole, mine)]
    for step in range(3):
        ids, labels = _batch(case, step)
        logits = losses[0].output(whole(ids))
        if not labels.is_floating_point() and logits.ndim == 3:  # one case swaps the axes of its outputs
            labels = labels.reshape(logits.shape[:-1])
        batch = ids, labels
        values = [_backward(whole, losses[0], *batch), _counted(mine, losses[1], *batch, counts)]
        torch.testing.assert_close(values[1], values[0], rtol=1e-6, atol=1e-6)
        for name, weight in named_weights(mine).items():
            reference = named_weights(whole)[name]
            assert (weight.grad is None) == (reference.grad is None), name
            if weight.grad is not None and reference.grad is not None:
                _close(weight.grad, reference.grad, placements.get(name), name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in named_weights(mine).items():
        _close(weight, named_weights(whole)[name], placements.get(name), name)
    return counts[:3]


def _both(
    case: dict[str, Any], rank: int, size: int, group: str
) -> tuple[ImportedGraph, ImportedGraph, list[Loss], dict[str, Placement]]:
    case = {name: value for name, value in case.items() if name != "soft"}
    fuse, freeze, settings = (
        case.pop("fuse", True),
        case.pop("freeze", ()),
        config(loss=case.pop("loss", "cross_entropy")),
    )
    whole = to_module(language_model(words=WORDS, **case), fuse=fuse)
    select_trained(whole, freeze=freeze)
    mine = copy.deepcopy(whole)
    found = find_vocabulary_sharding(mine, size, [loss_of(settings)])
    placements = shard_vocabulary(mine, found, rank=rank, group=group)
    assert "wte" in placements
    losses = [Loss(loss_of(settings), whole.output_names, classes=part) for part in (None, found.classes(rank, group))]
    return whole, mine, losses, placements


def _batch(case: dict[str, Any], step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    ids = torch.randint(-WORDS, WORDS, (BATCH, LENGTH))
    if case.get("loss") == "mse":
        return ids, torch.randn(BATCH * LENGTH, WORDS)
    if case.get("soft"):
        return ids, torch.randn(BATCH * LENGTH, WORDS).softmax(-1)
    labels = torch.randint(0, WORDS, (BATCH, LENGTH))
    return ids, labels.masked_fill(torch.rand(BATCH, LENGTH) < 0.25, -100)


def _backward(module: Callable[..., Any], loss: Loss, ids: Tensor, labels: Tensor) -> Tensor:
    total = loss(module(ids), labels, len(ids))
    (total / loss.count(labels, len(ids))).backward()
    return total.detach()


def _counted(module: ImportedGraph, loss: Loss, ids: Tensor, labels: Tensor, counts: list[int]) -> Tensor:
    """The same, and the collectives of forward pass, loss and backward pass; nothing as large as the logits is made."""
    modes = [CommDebugMode() for _ in range(3)]
    with _Largest() as largest:
        with modes[0]:
            outputs = module(ids)
        with modes[1]:
            total = loss(outputs, labels, len(ids))
        with modes[2]:
            (total / loss.count(labels, len(ids))).backward()  # type: ignore[no-untyped-call]
    counts += [mode.get_total_counts() for mode in modes]
    if loss.name == "cross_entropy":
        assert largest.numel < BATCH * LENGTH * WORDS
    return total.detach()


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def _close(mine: Tensor, whole: Tensor, placement: Placement | None, name: str) -> None:
    expected = whole
    if placement is not None:
        expected = torch.empty(placement.local_shape)
        for local, piece in placement.take(whole.detach()):
            expected[slices(local)] = piece
    scale = float(whole.detach().abs().max())
    torch.testing.assert_close(mine, expected, rtol=0, atol=2e-6 * max(scale, 1e-3), msg=lambda text: f"{name}: {text}")


def _evaluates_alike(rank: int, size: int, group: str) -> None:
    whole, mine, losses, _ = _both({}, rank, size, group)
    ids, labels = _batch({}, 7)
    with torch.no_grad():
        outputs = [module(ids) for module in (whole, mine)]
        torch.testing.assert_close(losses[1].output(outputs[1]), losses[0].output(outputs[0]))
        assert torch.equal(losses[1].predicted(outputs[1], labels), losses[0].predicted(outputs[0], labels))
        assert losses[1].num_classes(outputs[1], labels) == WORDS
        torch.testing.assert_close(losses[1](outputs[1], labels, BATCH), losses[0](outputs[0], labels, BATCH))


def _computes_in_other_ways(rank: int, size: int, group: str) -> None:
    """Recomputed: the same bits. Compiled: one graph. In half precision: as well as the whole."""
    whole, mine, losses, _ = _both({}, rank, size, group)
    batch = _batch({}, 3)
    _backward(mine, losses[1], *batch)
    plain = _taken(mine)
    _backward(lambda ids: checkpoint(mine, ids, use_reentrant=False), losses[1], *batch)
    assert all(torch.equal(one, other) for one, other in zip(plain, _taken(mine), strict=True))
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    _backward(compiled, losses[1], *batch)
    torch.testing.assert_close(_taken(mine), plain)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            outputs = [module(batch[0]) for module in (whole, mine)]
        totals = [loss(out, batch[1], BATCH) for loss, out in zip(losses, outputs, strict=True)]
        assert totals[1].dtype == torch.float32
        torch.testing.assert_close(totals[1], totals[0], rtol=1e-4, atol=1e-4)


def _taken(module: nn.Module) -> list[Tensor]:
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    module.zero_grad()
    return gradients


def _same_metrics(mpi: MPIContext, group: str) -> None:
    """Over all ranks of the world, which all divide the classes."""
    whole, mine, losses, _ = _both({}, mpi.rank, mpi.world_size, group)
    values = []
    for module, loss in zip((whole, mine), losses, strict=True):
        totals = EvaluationMetrics(
            Losses([loss.config], whole.output_names, classes=loss.classes), device=torch.device("cpu")
        )
        for step in range(3):
            ids, labels = _batch({}, step)
            with torch.no_grad():
                totals.update(module(ids), [labels], len(ids))
        values.append(totals.compute())
    assert values[1]["accuracy"] == values[0]["accuracy"]
    assert values[1]["loss"] == pytest.approx(values[0]["loss"], rel=1e-6)


# -- what exporters write

ARCHITECTURES = ("gpt2", "bert", "llama", "t5", "lstm_language_model")


@pytest.mark.slow
def test_exported_models_compute_the_same_when_sharded() -> None:
    run_ranks(4, "tests.trainer.parallel.tensor.test_vocabulary:exports_alike", timeout_s=300)


def exports_alike(mpi: MPIContext) -> None:
    groups = {size: new_group(range(size), timeout_s=60) for size in (2, 3, 4)}
    for name in ARCHITECTURES:
        for exporter, folded, fuse in (
            ("legacy-17", False, True),
            ("legacy-14", True, True),
            ("legacy-17", True, False),
        ):
            for size, group in groups.items():
                if group is not None:
                    _export_alike(name, exporter, (folded, fuse), (mpi.rank, size, group.group_name))


def _export_alike(name: str, exporter: str, how: tuple[bool, bool], place: tuple[int, int, str]) -> None:
    rank, size, group = place
    whole = to_module(zoo.export(name, exporter, folded=how[0]), fuse=how[1]).eval()
    mine = copy.deepcopy(whole)
    found = find_vocabulary_sharding(mine, size, [loss_of(config())])
    placements = shard_vocabulary(mine, found, rank=rank, group=group)
    assert placements, name
    losses = [Loss(loss_of(config()), whole.output_names, classes=part) for part in (None, found.classes(rank, group))]
    inputs = [*zoo.feed(name, 3).values()]
    outputs: list[Sequence[Tensor]] = [module(*inputs) for module in (whole, mine)]
    shape = losses[0].output(outputs[0]).shape
    labels = torch.randint(0, shape[-1], shape[:-1], generator=torch.Generator().manual_seed(0))
    totals = [loss(out, labels, 3) for loss, out in zip(losses, outputs, strict=True)]
    torch.testing.assert_close(totals[1], totals[0], rtol=1e-5, atol=1e-5)
    for total in totals:
        total.backward()
    for key, weight in named_weights(mine).items():
        reference = named_weights(whole)[key]
        if reference.grad is not None and weight.grad is not None:
            _close(weight.grad, reference.grad, placements.get(key), f"{name} {exporter} {how} {key}")

"""The whole graph divided, cut and arranged in stages, before a rank takes its own: decided from shapes alone.

    layers and vocabulary -> tensor-parallel parts -> stages -> units -> which of them are recomputed

Every rank decides all of it from the same graph and the same example, and so does `onward plan`, which has no ranks.
Ranks that divide layers may have unequal shares, so what depends on how much there is, is decided for the largest.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from onward.trainer.config.run_config import RunConfig
from onward.trainer.distributed.placement import Placement
from onward.trainer.distributed.processes import Coordinate
from onward.trainer.distributed.weights import Weight, shape_of
from onward.trainer.errors import ConfigError
from onward.trainer.model.vocabulary_loss import ClassShard
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.ops.norm import BatchNorm
from onward.trainer.parallel.cost import Autocast, NodeCost, estimate_costs
from onward.trainer.parallel.memory import activation_budget
from onward.trainer.parallel.pipeline.balance import choose_cuts, choose_unit_cuts, node_work
from onward.trainer.parallel.pipeline.cut_points import CutPoint, cuts_by_name, find_cut_points
from onward.trainer.parallel.pipeline.rematerialise import partitioned_nodes
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import Stage, build_stages
from onward.trainer.parallel.recompute import recompute
from onward.trainer.parallel.recompute_choice import choose_by_budget, choose_by_name, unit_costs
from onward.trainer.parallel.tensor.regions import TensorSharding, find_regions
from onward.trainer.parallel.tensor.rewrite import shard_regions
from onward.trainer.parallel.tensor.vocabulary import VocabularySharding, find_vocabulary_sharding, shard_vocabulary


@dataclass(frozen=True)
class Arrangement:
    """What all ranks of one tensor-parallel coordinate know."""

    stages: tuple[Stage, ...]
    """All of them. Weights, buffers and modules are those of the imported graph."""
    cuts: Cuts
    regions: TensorSharding
    words: VocabularySharding
    placements: Mapping[str, Placement]
    """Which part of each divided weight the rank has."""
    classes: ClassShard | None
    """Which classes of the logits it computes; None = all."""
    shared: Mapping[str, tuple[int, ...]]
    """Name -> pipeline coordinates, for every weight that several stages hold."""
    largest: Arrangement | None
    """That of the tensor-parallel rank with the largest share, if it is another's; of shapes alone."""

    def of(self, pipeline: int, size: int) -> list[Stage]:
        """The stages of one of `size` pipeline coordinates."""
        return list(self.stages[pipeline::size])

    def weights(self, stages: Sequence[Stage], here: Coordinate) -> list[Weight]:
        """Every stored tensor of a rank's stages, once for each stage that uses it."""
        weights: list[Weight] = []
        for stage in stages:
            remains = what_remains(stage)
            for name, tensor in _stored(stage):
                first = all(weight.name != name for weight in weights)
                leads = first and self.shared.get(name, [here.pipeline])[0] == here.pipeline
                placement = self.placements.get(name) or Placement.whole(tensor.shape)
                counted = leads and (here.tensor == 0 or name in self.placements)
                weights.append(Weight(name, tensor, placement, is_trained(tensor), counted, remains.get(name, 0.0)))
        return weights


def arrange(
    module: ImportedGraph,
    config: RunConfig,
    example: Sequence[Tensor],
    *,
    rank: int,
    group: str,
    autocast: Autocast,
    price: bool = False,
) -> Arrangement:
    """Divide the graph for tensor-parallel rank `rank`, in place, and cut it.

    example: the inputs of one micro-batch. group: name of the tensor-parallel group, which must be there. price:
    whether to price the graph even if nothing depends on it. Raises ConfigError or UnsupportedModel when it cannot be
    divided as configured.
    """
    parallel, largest = config.parallel, None
    if rank < parallel.tensor - 1:  # the last rank's shares are the largest
        memo = {id(tensor): shape_of(tensor) for tensor in module.parameters()}
        largest = arrange(
            copy.deepcopy(module, memo),
            config,
            example,
            rank=parallel.tensor - 1,
            group=group,
            autocast=autocast,
            price=price,
        )
    regions = find_regions(module, parallel.tensor, convolutions=parallel.convolutions)
    taken = {name for region in regions.regions for name in (*region.columns, *region.rows)}
    words = find_vocabulary_sharding(module, parallel.tensor if parallel.vocabulary else 1, config.model, taken=taken)
    placements = shard_regions(module, regions, rank=rank, group=group)
    placements |= shard_vocabulary(module, words, rank=rank, group=group)
    if parallel.tensor > 1 and not placements:
        reasons = "; ".join(f"{name}: {why}" for name, why in [*regions.replicated, *words.replicated][:3])
        raise ConfigError(
            f"nothing of this graph can be divided over parallel.tensor = {parallel.tensor} ranks"
            + (f" ({reasons})" if reasons else "")
            + "; use parallel.data or parallel.pipeline"
        )
    cuts = largest.cuts if largest else _cuts(module, config, example, autocast, price=price)
    stages = _stages(module, cuts)
    return Arrangement(
        stages=tuple(stages),
        cuts=cuts,
        regions=regions,
        words=words,
        placements=placements,
        classes=words.classes(rank, group),
        shared=_shared(stages, parallel.pipeline),
        largest=largest,
    )


@dataclass(frozen=True)
class Cuts:
    """Where the graph is cut, whichever tensor-parallel rank's share of it that is."""

    borders: Sequence[CutPoint]
    """Between stages."""
    inner: Sequence[CutPoint]
    """Between units of one stage."""
    priced: Mapping[str, NodeCost]
    """What every node of the largest share costs for the example; nothing where one stage is one unit."""


def _cuts(
    module: ImportedGraph, config: RunConfig, example: Sequence[Tensor], autocast: Autocast, *, price: bool
) -> Cuts:
    parallel = config.parallel
    num_stages = parallel.pipeline * parallel.stages_per_rank
    in_units = parallel.zero or parallel.units or config.recompute.mode != "none"
    if num_stages == 1 and not in_units and not price:
        return Cuts((), (), {})
    priced = estimate_costs(module, example, autocast=autocast)
    points = find_cut_points(module.graph, priced)
    amounts = node_work(module.graph, priced)
    if parallel.cuts:
        borders = cuts_by_name(module.graph, points, parallel.cuts)
    else:
        borders = choose_cuts(points, amounts, num_stages)
    inner = choose_unit_cuts(module, points, amounts, borders, parallel.units) if in_units else []
    return Cuts(borders, inner, priced)


def _stages(module: ImportedGraph, cuts: Cuts) -> list[Stage]:
    """All stages of the graph, each in its units."""
    parts = iter(split(module, sorted({*cuts.borders, *cuts.inner}, key=lambda point: point.position)))
    ends = [0, *(point.position for point in cuts.borders), len(partitioned_nodes(module.graph))]
    sizes = [1 + sum(begin < point.position < end for point in cuts.inner) for begin, end in itertools.pairwise(ends)]
    return build_stages(module, [[*itertools.islice(parts, size)] for size in sizes], cuts.priced)


def _shared(stages: Sequence[Stage], pipeline: int) -> dict[str, tuple[int, ...]]:
    """Name -> pipeline coordinates, for every weight that several stages hold.

    Raises ConfigError for running statistics: each stage would move its own.
    """
    holders: dict[str, list[int]] = {}
    problems = []
    for stage in stages:
        for name, tensor in _stored(stage):
            holders.setdefault(name, []).append(stage.index)
            if len(holders[name]) > 1 and not isinstance(tensor, nn.Parameter):
                problems.append(
                    f"running statistic {name!r} is used in stages {holders[name]}, each of which would move it; give "
                    f"each node its own: model.untie = [{name!r}]"
                )
    if problems:
        raise ConfigError(problems)
    shared = {name: sorted({index % pipeline for index in found}) for name, found in holders.items() if len(found) > 1}
    return {name: tuple(coordinates) for name, coordinates in shared.items()}


def _stored(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, tensor) of what a stage stores, each once."""
    seen: set[int] = set()
    for part in stage.chain.parts:
        names: dict[str, str] = part.module.onnx_names  # type: ignore[assignment]
        for path, name in names.items():
            owner, _, leaf = path.rpartition(".")
            tensor: Tensor = getattr(part.module.get_submodule(owner), leaf)
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def what_remains(stage: Stage) -> dict[str, float]:
    """Name -> the share of a running statistic that one micro-batch leaves of it."""
    found: dict[str, float] = {}
    for part in stage.chain.parts:
        names: dict[str, str] = part.module.onnx_names  # type: ignore[assignment]
        assert isinstance(part.module, fx.GraphModule)
        for node in part.module.graph.find_nodes(op="call_module"):
            norm = part.module.get_submodule(str(node.target))
            if isinstance(norm, BatchNorm) and not norm.frozen:
                for operand in node.args[3:]:
                    if isinstance(operand, fx.Node) and (name := names.get(str(operand.target))):
                        found[name] = found.get(name, 1.0) * (1.0 - norm.momentum)
    return found


def is_trained(tensor: Tensor) -> bool:
    """Whether a stored tensor is trained: not frozen, no running statistic."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


# -- recomputation


def recompute_units(
    whole: Arrangement,
    stages: Sequence[Stage],
    config: RunConfig,
    inputs: Sequence[Tensor],
    *,
    pipeline: int,
) -> list[tuple[int, ...]]:
    """Mark the units of a rank's stages that are computed again in the backward pass; returns which, of each stage.

    inputs: the example's. Raises ConfigError for names that nothing has, or when memory is too small for any choice.
    """
    mode = config.recompute.mode
    chosen: Sequence[Sequence[int]]
    if mode == "none":
        chosen = [() for _ in stages]
    elif config.recompute.units:
        elsewhere = [part for stage in whole.stages for part in stage.chain.parts]
        chosen = [choose_by_name(stage.chain, config.recompute.units, elsewhere=elsewhere) for stage in stages]
    elif config.parallel.memory_gib:
        chosen = _affordable(whole.largest or whole, config, inputs, pipeline=pipeline)
    else:
        chosen = [range(len(stage.chain.parts)) for stage in stages]
    for stage, numbers in zip(stages, chosen, strict=True):
        recompute(stage.chain, mode, numbers)
    return [tuple(numbers) for numbers in chosen]


def _affordable(
    whole: Arrangement, config: RunConfig, inputs: Sequence[Tensor], *, pipeline: int
) -> list[Sequence[int]]:
    """As few units as `parallel.memory_gib` allows: of each stage of one pipeline coordinate."""
    assert config.recompute.mode != "none"
    stages = whole.of(pipeline, config.parallel.pipeline)
    weights = whole.weights(stages, Coordinate(pipeline, 0, 0))
    units = [unit for stage in stages for unit in unit_costs(stage.chain.parts, whole.cuts.priced)]
    size = sum(value.nbytes for value in inputs)
    left, in_flight = activation_budget(stages, weights, config, pipeline=pipeline, batch_bytes=size)
    _, picked = choose_by_budget(units, in_flight=in_flight, budget_bytes=left, modes=("none", config.recompute.mode))
    ends = [0, *itertools.accumulate(len(stage.chain.parts) for stage in stages)]
    return [[n - begin for n in picked if begin <= n < end] for begin, end in itertools.pairwise(ends)]

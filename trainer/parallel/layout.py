"""Decide how the graph is divided over the ranks: tensor-parallel shards, pipeline stages, units, recomputation.

    graph of 4 layers, parallel.tensor = 2, parallel.pipeline = 2, parallel.units = 2

    a ---- b ---- c ---- d          1. divide: tensor rank 0 holds a0 b0 c0 d0, tensor rank 1 holds a1 b1 c1 d1
    a ---- b  |   c ---- d          2. cut into stages at `Cuts.stages`
    a  :  b   |   c  :   d          3. cut each stage into units at `Cuts.units` (ZeRO, recomputation, torch.compile)
    a  :  b*  |   c* :   d          4. choose the units to recompute (*)

Every rank decides all of it from the same graph and the same example, and so does `onward plan`, which has no ranks;
nothing is sent. Tensor-parallel ranks may hold shards of unequal size (65 columns over 2 ranks: 32 and 33), but must
cut at the same places. So costs are always those of the last rank, whose shards are the largest.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import ParallelConfig, RecomputeConfig
from onward.trainer.distributed.mesh import Coordinate
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.errors import ConfigError
from onward.trainer.model.losses.vocabulary_loss import ClassShard
from onward.trainer.model.weight_casts import insert_casts
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.lowering.runtime_node import RuntimeNode
from onward.trainer.parallel.cost import Autocast, NodeCost, estimate_costs
from onward.trainer.parallel.matrices import find_matrices
from onward.trainer.parallel.pipeline.balance import choose_cuts, choose_unit_cuts, node_work
from onward.trainer.parallel.pipeline.cut_points import CutPoint, cuts_by_name, find_cut_points
from onward.trainer.parallel.pipeline.interleave import interleave_teacher
from onward.trainer.parallel.pipeline.rematerialise import partitioned_nodes
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import Stage, build_stages
from onward.trainer.parallel.planning.device_model import CPU, Device
from onward.trainer.parallel.planning.stage_memory import RankMemory
from onward.trainer.parallel.recomputation.compressed_activations import compress_stages
from onward.trainer.parallel.recomputation.recompute import Mode, recompute
from onward.trainer.parallel.recomputation.recompute_choice import choose_by_budget, choose_by_name, unit_costs
from onward.trainer.parallel.stage_weights import is_trained, running_statistic_retention, stored_tensors
from onward.trainer.parallel.tensor.regions import TensorSharding, find_regions
from onward.trainer.parallel.tensor.rewrite import shard_regions
from onward.trainer.parallel.tensor.sequence_parallel import divide_sequence
from onward.trainer.parallel.tensor.vocabulary import VocabularySharding, find_vocabulary_sharding, shard_vocabulary


@dataclass(frozen=True)
class Cuts:
    """Where the graph is cut; the same on every tensor-parallel rank."""

    stages: Sequence[CutPoint]
    """Between stages."""
    units: Sequence[CutPoint]
    """Between units of one stage."""
    node_costs: Mapping[str, NodeCost]
    """The cost of every node on the last tensor-parallel rank, for the example; empty if there is one stage of one
    unit."""


@dataclass(frozen=True)
class DividedGraph:
    """The graph of one tensor-parallel rank, and what it holds; `Layout` adds the stages that it is cut into."""

    module: ImportedGraph
    regions: TensorSharding
    vocabulary: VocabularySharding
    placements: Mapping[str, Placement]
    """Initializer name -> the part that this tensor-parallel rank holds, for every weight that is sharded."""
    classes: ClassShard | None
    """The classes of the logits that this tensor-parallel rank computes; None = all."""
    partial: frozenset[str]
    """Names of the weights whose gradients the tensor-parallel ranks compute in parts (`Weight.partial`)."""
    matrices: Mapping[str, int]
    """Initializer name -> dimension of the output features, of the weights that Muon takes by default; the same on all
    ranks. Empty for the other optimizers."""


@dataclass(frozen=True)
class Layout(DividedGraph):
    """How the graph is divided, as seen by the ranks of one tensor-parallel coordinate."""

    stages: tuple[Stage, ...]
    """All stages of the pipeline. Their weights, buffers and modules are those of the imported graph."""
    cuts: Cuts
    shared: Mapping[str, tuple[int, ...]]
    """Initializer name -> pipeline coordinates of the ranks that hold it, for every weight that several stages hold."""
    largest: Layout | None
    """The layout of the last tensor-parallel rank, without data; None if this is it."""
    device: Device
    """What the decisions were made for."""

    def of(self, pipeline: int, size: int) -> list[Stage]:
        """Return the stages of one of `size` pipeline coordinates (interleaved: every `size`th stage)."""
        return list(self.stages[pipeline::size])

    def weights(self, stages: Sequence[Stage], here: Coordinate) -> list[Weight]:
        """Return every stored tensor of a rank's stages, once for each stage that uses it."""
        weights: list[Weight] = []
        for stage in stages:
            retention = running_statistic_retention(stage)
            for name, tensor in stored_tensors(stage).items():
                # counted once in the world: by the first stage of the first pipeline coordinate that holds it
                first_here = all(weight.name != name for weight in weights)
                first = first_here and self.shared.get(name, [here.pipeline])[0] == here.pipeline
                # a replicated weight is counted by tensor rank 0, a sharded one by the holder of each part
                counts_here = here.tensor == 0 or name in self.placements
                weights.append(
                    Weight(
                        name,
                        tensor,
                        self.placements.get(name) or Placement.full(tensor.shape),
                        trained=is_trained(tensor),
                        counted=first and counts_here,
                        retention=retention.get(name, 0.0),
                        partial=name in self.partial,
                        outputs=self.matrices.get(name),
                        stage=stage.index,
                    )
                )
        return weights


def build_layout(
    module: ImportedGraph,
    config: RunConfig,
    example: Sequence[Tensor],
    *,
    rank: int,
    group: str,
    autocast: Autocast,
    device: Device = CPU,
) -> Layout:
    """Divide the graph in place for tensor-parallel rank `rank`, and cut it.

    example: the inputs of a micro-batch, [B, ...]. group: name of the tensor-parallel process group. device: the same
    on every rank (`device.typical`). Raises ConfigError or UnsupportedModel when the graph cannot be divided as
    configured.
    """
    check_replicas(module, config.parallel)
    last = config.parallel.tensor - 1
    # divided in place like the module itself, but only its shapes are used
    # before the module itself is divided, which happens in place
    module_of_last = module if rank == last else _copy_without_data(module)
    divided = divide(module_of_last, config, rank=last, group=group, device=device)
    cuts = find_cuts(divided.module, config.parallel, config.recompute, example, autocast)
    largest = cut(divided, cuts, config.parallel, device)
    if rank == last:
        return largest
    own = divide(module, config, rank=rank, group=group, device=device)
    return replace(cut(own, cuts, config.parallel, device), largest=largest)


# -- tensor parallelism


def divide(module: ImportedGraph, config: RunConfig, *, rank: int, group: str, device: Device) -> DividedGraph:
    """Replace the weights of column- and row-parallel layers by this rank's shards, in place; add casts to half."""
    interleave_teacher(module.graph)
    # before the graph is divided
    matrices = find_matrices(module) if config.optimizer.name == "muon" else {}
    parallel = config.parallel
    regions = find_regions(
        module, parallel.tensor, convolutions=parallel.convolutions, flops_per_byte=device.flops_per_byte
    )
    # a weight is sharded either by features or by vocabulary entries
    taken = {name for region in regions.regions for name in (*region.columns, *region.rows)}
    has_teacher = bool(config.soft_losses)
    vocabulary = find_vocabulary_sharding(module, parallel.tensor, config.losses, taken=taken, has_teacher=has_teacher)
    placements = shard_regions(module, regions, rank=rank, group=group)
    # both were found before either was changed: they look for layers of the undivided graph
    placements |= shard_vocabulary(module, vocabulary, rank=rank, group=group)
    if parallel.tensor > 1 and not placements:
        reasons = "; ".join(f"{name}: {why}" for name, why in [*regions.replicated, *vocabulary.replicated][:3])
        raise ConfigError(
            f"nothing of this graph can be divided over parallel.tensor = {parallel.tensor} ranks"
            + (f" ({reasons})" if reasons else "")
            + "; use parallel.data or parallel.pipeline"
        )
    partial = divide_sequence(module, parallel, rank=rank, group=group).partial
    insert_casts(module, config.precision)
    return DividedGraph(module, regions, vocabulary, placements, vocabulary.classes(rank, group), partial, matrices)


def _copy_without_data(module: ImportedGraph) -> ImportedGraph:
    """Copy the graph with parameters on the meta device: shapes and types, no data."""
    # deepcopy takes what is in its memo, which is keyed by id(), in place of copying it
    return copy.deepcopy(module, {id(parameter): _meta_parameter(parameter) for parameter in module.parameters()})


def drop_data(modules: Iterable[nn.Module]) -> None:
    """Replace the parameters of these modules by parameters on the meta device, which frees their memory."""
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, _meta_parameter(parameter))


def _meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


# -- stages and units


def find_cuts(
    module: ImportedGraph,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    example: Sequence[Tensor],
    autocast: Autocast,
    *,
    with_costs: bool = False,
    known: Mapping[str, NodeCost] | None = None,
) -> Cuts:
    """Choose the places between stages and between units, by the costs of the nodes or as configured.

    module: divided for the last tensor-parallel rank. with_costs: estimate the costs of the nodes even if nothing
    depends on them. known: the costs, if they have been estimated for this example.
    """
    num_stages = parallel.pipeline * parallel.stages_per_rank
    # units are what ZeRO gathers and what the backward pass recomputes; nothing else needs them
    has_units = parallel.zero or parallel.units or recompute.mode in ("whole", "selective")
    if num_stages == 1 and not has_units and not with_costs:
        return Cuts((), (), {})  # a model whose shapes depend on data can be trained like this, but not estimated
    node_costs = known or estimate_costs(module, example, autocast=autocast)
    points = find_cut_points(module.graph, node_costs)
    work = node_work(module.graph, node_costs)
    if parallel.cuts:
        stage_cuts = cuts_by_name(module.graph, points, parallel.cuts)
    else:
        stage_cuts = choose_cuts(points, work, num_stages)
    unit_cuts = choose_unit_cuts(module, points, work, stage_cuts, parallel.units) if has_units else []
    return Cuts(stage_cuts, unit_cuts, node_costs)


def cut(divided: DividedGraph, cuts: Cuts, parallel: ParallelConfig, device: Device) -> Layout:
    """Split the divided graph into stages of units. The graph itself is not changed, and may be cut again."""
    module = divided.module
    units = iter(split(module, sorted({*cuts.stages, *cuts.units}, key=lambda point: point.position)))
    ends = [0, *(point.position for point in cuts.stages), len(partitioned_nodes(module.graph))]
    # parts of each stage: one more than the cuts inside it
    sizes = [1 + sum(begin < point.position < end for point in cuts.units) for begin, end in itertools.pairwise(ends)]
    stages = build_stages(module, [[*itertools.islice(units, size)] for size in sizes], cuts.node_costs)
    shared = _shared_weights(stages, parallel.pipeline)
    return Layout(**vars(divided), stages=tuple(stages), cuts=cuts, shared=shared, largest=None, device=device)


def _shared_weights(stages: Sequence[Stage], pipeline: int) -> dict[str, tuple[int, ...]]:
    """Return the pipeline coordinates that hold it, for every weight that several stages hold.

    Raises ConfigError for running statistics: each stage would update its own copy with its own batches.
    """
    holders: dict[str, list[int]] = {}
    problems = []
    for stage in stages:
        for name, tensor in stored_tensors(stage).items():
            # stages and not ranks: two stages of one rank would update two copies, too
            holders.setdefault(name, []).append(stage.index)
            if len(holders[name]) > 1 and not isinstance(tensor, nn.Parameter):
                problems.append(
                    f"running statistic {name!r} is used in stages {holders[name]}, and each would update its own "
                    f"copy; give each node its own statistic: model.untie = [{name!r}]"
                )
    if problems:
        raise ConfigError(problems)
    # interleaved stages go around the pipeline, so stage i is on coordinate i modulo its size
    shared: dict[str, tuple[int, ...]] = {}
    for name, indices in holders.items():
        if len(indices) > 1:
            shared[name] = tuple(sorted({index % pipeline for index in indices}))
    return shared


def check_replicas(module: ImportedGraph, parallel: ParallelConfig) -> None:
    """Raise ConfigError for nodes with which replicas would not stay equal."""
    if parallel.data > 1 and (problems := _conditional_updates(module)):
        raise ConfigError(problems)


def _conditional_updates(module: ImportedGraph) -> list[str]:
    """Return a sentence for each node whose inner graphs update running statistics, in some steps or several times."""
    parameters = dict(module.named_parameters())
    problems = []
    for node in module.graph.find_nodes(op="call_module"):
        each = module.get_submodule(str(node.target))
        if not isinstance(each, RuntimeNode) or not each.statistics or each.node.op_type == "BatchNormalization":
            continue
        read = [parameters.get(str(operand.target)) for operand in node.all_input_nodes]
        # a BatchNormalization whose scale and bias are frozen keeps its statistics
        if any(parameter is not None and parameter.requires_grad for parameter in read):
            problems.append(
                f"node {each.node.name or each.node.output[0]!r}: {each.node.op_type} holds a BatchNormalization, "
                f"whose running statistics ({', '.join(sorted(each.statistics))}) replicas would update a different "
                "number of times; use parallel.data = 1, or freeze its scale and bias"
            )
    return problems


# -- recomputation


def recompute_units(
    layout: Layout,
    stages: Sequence[Stage],
    config: RunConfig,
    inputs: Sequence[Tensor],
    *,
    pipeline: int,
) -> list[tuple[int, ...]]:
    """Mark the units of a rank's stages that the backward pass computes again; return their numbers for each stage.

    In mode `compressed` there are none, and all keep less. inputs: those of the example. Raises ConfigError for names
    that no unit has, or when memory is too small for any choice.
    """
    mode = config.recompute.mode
    if mode != "whole" and mode != "selective":
        if mode != "none":
            compress_stages(stages, config.recompute.stash)
        return [() for _ in stages]
    chosen: Sequence[Sequence[int]]
    if config.recompute.units:
        all_units = [unit for stage in layout.stages for unit in stage.chain.parts]
        chosen = [choose_by_name(stage.chain, config.recompute.units, elsewhere=all_units) for stage in stages]
    elif config.parallel.memory_gib:
        chosen = _fewest_units(layout.largest or layout, config, inputs, mode, pipeline=pipeline)
    else:
        # neither names nor a memory limit: recompute everything
        chosen = [range(len(stage.chain.parts)) for stage in stages]
    for stage, numbers in zip(stages, chosen, strict=True):
        recompute(stage.chain, mode, numbers)
    return [tuple(numbers) for numbers in chosen]


def _fewest_units(
    layout: Layout, config: RunConfig, inputs: Sequence[Tensor], mode: Mode, *, pipeline: int
) -> list[Sequence[int]]:
    """Choose, in each stage of one pipeline coordinate, as few units as fit into `parallel.memory_gib`."""
    stages = layout.of(pipeline, config.parallel.pipeline)
    # any replica and tensor rank: the layout is that of the rank with the largest shards
    weights = layout.weights(stages, Coordinate(pipeline, 0, 0))
    units = [unit for stage in stages for unit in unit_costs(stage.chain.parts, layout.cuts.node_costs)]
    batch_bytes = sum(value.nbytes for value in inputs)
    # what the weights, gradients and buffers leave of the limit
    memory = RankMemory(stages, weights, config, pipeline=pipeline, batch_bytes=batch_bytes)
    left_bytes, in_flight = memory.left_for_activations(layout.device.type)
    picked = choose_by_budget(units, mode, in_flight=in_flight, budget_bytes=left_bytes)
    # `picked` numbers the units of all stages one after the other
    ends = [0, *itertools.accumulate(len(stage.chain.parts) for stage in stages)]
    units_of_stages: list[Sequence[int]] = []
    for begin, end in itertools.pairwise(ends):
        units_of_stages.append([number - begin for number in picked if begin <= number < end])
    return units_of_stages

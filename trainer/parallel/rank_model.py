"""From the imported graph to what this rank computes: divided, cut into stages and units, recomputed, sharded.

    trainable -> tensor -> pipeline -> units -> compile -> recomputation -> replicas

Each step is the identity where its size is 1. Every rank decides all of it from the same graph and the same example,
so nothing has to be agreed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onward.trainer.config.run_config import RunConfig
from onward.trainer.distributed.placement import Placement, slices
from onward.trainer.distributed.processes import MPIContext, ParallelDims
from onward.trainer.distributed.weights import Weight, fill, shape_of
from onward.trainer.errors import CheckpointError
from onward.trainer.model import precision
from onward.trainer.model.compile import accelerate
from onward.trainer.model.loss import Loss
from onward.trainer.model.trainable import TrainableModel
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.parallel.cost import Autocast, estimate_costs
from onward.trainer.parallel.layout import arrange, is_trained, recompute_units
from onward.trainer.parallel.pipeline.stage import Stage, build_stages
from onward.trainer.parallel.replicas.reducer import Reducer, gradient
from onward.trainer.parallel.replicas.zero import Sharded


@dataclass(frozen=True)
class Assembly:
    """What one rank computes, and all it holds."""

    stages: tuple[Stage, ...]
    loss: Loss
    reducer: Reducer | Sharded
    """Who holds the weights and makes the gradients of all ranks one."""
    shapes: Mapping[str, tuple[int, ...]]
    """Every stored tensor of the whole model, by name."""
    trained_names: frozenset[str]
    """Names of those that are trained, on whichever rank."""
    shapes_of: Callable[[Sequence[Tensor]], Sequence[Stage]]
    """Graph inputs of a micro-batch -> this rank's stages, with what crosses their borders then."""
    tells: frozenset[int]
    """The weights (by id of their tensor) that this rank tells others of: of each part, one rank."""
    total_squares: Callable[[Tensor], Tensor]
    """Squared norms of this rank's parts of its trained weights -> those of the whole weights. Collective: every
    rank of the axes that divide them."""

    @property
    def trained(self) -> list[Weight]:
        """This rank's trained weights."""
        return [weight for weight in self.reducer.weights if weight.trained]

    @property
    def num_parameters(self) -> int:
        """Trained elements of the whole model."""
        return sum(math.prod(self.shapes[name]) for name in self.trained_names)

    def parts(self) -> dict[str, tuple[Tensor, Placement]]:
        """What this rank holds of the model, under the keys of a checkpoint."""
        return {f"model/{weight.name}": (weight.tensor, weight.placement) for weight in self.reducer.weights}

    def whole(self, names: Collection[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Trained weights and their gradients, whole, in fp32, by name. Collective: every rank of the world."""
        found = {name: torch.zeros(2, *self.shapes[name]) for name in sorted(names)}
        for weight in self.trained:
            if weight.name in found and id(weight.tensor) in self.tells:
                for local, place in weight.placement.boxes():
                    found[weight.name][0][slices(place)] = weight.tensor.detach()[slices(local)]
                    found[weight.name][1][slices(place)] = gradient(weight)[slices(local)]
        for pair in found.values() if dist.get_world_size() > 1 else ():
            dist.all_reduce(pair)
        return {name: (weight, gradient) for name, (weight, gradient) in found.items()}

    def refuse_others(self, found: Mapping[str, tuple[int, ...]], optimizer_keys: Collection[str]) -> None:
        """Raises CheckpointError unless a checkpoint of these tensors is of this very model and optimizer, whole."""
        wanted = {f"model/{name}": shape for name, shape in self.shapes.items()}
        problems = [f"{name} is missing" for name in {*wanted, *optimizer_keys} - found.keys()]
        problems += [f"{name} is not in the model" for name in found.keys() - wanted.keys() - {*optimizer_keys}]
        for name in wanted.keys() & found.keys():
            if wanted[name] != found[name]:
                problems.append(f"{name} is {list(found[name])}, the model's is {list(wanted[name])}")
        if problems:
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(sorted(problems)[:5])}")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `model/...` parts into the weights. Raises CheckpointError unless all fit."""
        own = {key.removeprefix("model/"): tensor for key, tensor in tensors.items() if key.startswith("model/")}
        fill(self.reducer.weights, own)


def assemble(
    trainable: TrainableModel, config: RunConfig, mesh: DeviceMesh, mpi: MPIContext, *, example: Sequence[Tensor]
) -> Assembly:
    """This rank's share of the trainable, on its device; the trainable's module is used up.

    example: the inputs of one micro-batch, the same shapes on every rank. Collective: every rank. Raises ConfigError
    or UnsupportedModel, on every rank alike, when the graph cannot be divided as configured.
    """
    module, here = trainable.module, ParallelDims.of(config.parallel).coordinate(mpi.rank)
    stored = named_weights(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    trained = frozenset(name for name, tensor in stored.items() if is_trained(tensor))
    autocast = partial(precision.autocast, config.precision, mpi.device)
    group = mesh.get_group("tensor").group_name
    whole = arrange(module, config, example, rank=here.tensor, group=group, autocast=autocast)
    mine = whole.of(here.pipeline, config.parallel.pipeline)
    _own(mine)
    for stage in mine:
        stage.chain.to(mpi.device)
        for place, unit in enumerate(stage.chain.units):
            stage.chain.units[place] = accelerate(cast("ImportedGraph", unit), config.graph, mpi.device)
    weights = whole.weights(mine, here)
    recompute_units(whole, mine, config, example, pipeline=here.pipeline)
    _forget_weights(module, [stage for stage in whole.stages if stage not in mine])
    replicas = partial(Sharded, mine) if config.parallel.zero else Reducer
    reducer = replicas(
        weights,
        mesh=mesh,
        mpi=mpi,
        config=config.parallel,
        shared=whole.shared,
        timeout_s=config.launch.collective_timeout_s,
    )
    return Assembly(
        stages=tuple(mine),
        loss=Loss(config.model, module.output_names, classes=whole.classes),
        reducer=reducer,
        shapes=shapes,
        trained_names=trained,
        shapes_of=partial(_shapes_of, module, mine, whole.stages, autocast),
        tells=_told(weights, reducer.weights, mesh),
        total_squares=_total_squares(weights, reducer.weights, mesh, whole.placements),
    )


# -- what runs where


def _shapes_of(
    module: ImportedGraph,
    mine: Sequence[Stage],
    stages: Sequence[Stage],
    autocast: Autocast,
    inputs: Sequence[Tensor],
) -> list[Stage]:
    """This rank's stages with what crosses their borders for other inputs."""
    priced = estimate_costs(
        module, inputs, autocast=autocast, training=False
    )  # BatchNorm refuses a single row in training
    again = build_stages(module, [stage.chain.parts for stage in stages], priced)
    return [
        replace(stage, received_meta=again[stage.index].received_meta, output_meta=again[stage.index].output_meta)
        for stage in mine
    ]


def _forget_weights(module: ImportedGraph, others: Sequence[Stage]) -> None:
    """Leave of the whole graph's and of other ranks' weights their shapes: the stages of this rank hold its own."""
    for owner in (owner for whole in (module, *(stage.chain for stage in others)) for owner in whole.modules()):
        for leaf, tensor in owner.named_parameters(recurse=False):
            setattr(owner, leaf, shape_of(tensor))


def _own(stages: Sequence[Stage]) -> None:
    """Give each stage of this rank a copy of its own of what another of them holds as well."""
    seen: set[int] = set()
    for stage in stages:
        copies: dict[int, nn.Parameter] = {}
        for module in stage.chain.modules():
            for leaf, tensor in module.named_parameters(recurse=False):
                if id(tensor) in seen and id(tensor) not in copies:
                    copies[id(tensor)] = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
                if id(tensor) in copies:
                    setattr(module, leaf, copies[id(tensor)])
        seen |= {id(tensor) for tensor in stage.chain.parameters()}


# -- what this rank holds


def _told(weights: Sequence[Weight], held: Sequence[Weight], mesh: DeviceMesh) -> frozenset[int]:
    """Replicas hold the same of what is not sharded, groups of shards the same of what is: the first of them tells."""
    first = {True: mesh.get_local_rank("replicate") == 0, False: mesh.get_local_rank("data") == 0}
    return frozenset(
        id(part.tensor)
        for part, weight in zip(held, weights, strict=True)
        if part.counted and first[part.placement != weight.placement]
    )


def _total_squares(
    weights: Sequence[Weight], reducer: Sequence[Weight], mesh: DeviceMesh, placements: Mapping[str, Placement]
) -> Callable[[Tensor], Tensor]:
    """Sums squares [..., n] of the parts of n weights over the axes that divide them."""
    by_tensor = torch.tensor([weight.name in placements for weight in weights if weight.trained])
    sharded = torch.tensor(
        [part.placement != weight.placement for part, weight in zip(reducer, weights, strict=True) if weight.trained]
    )
    axes = [
        (mesh.get_group(axis), divided)
        for axis, divided in (("shard", sharded), ("tensor", by_tensor))
        if mesh.get_group(axis).size() > 1
    ]

    def total(squares: Tensor) -> Tensor:
        for group, divided in axes:
            mask = divided.to(squares.device)
            parts = torch.where(mask, squares, 0.0)
            dist.all_reduce(parts, group=group)
            squares = torch.where(mask, parts, squares)
        return squares

    return total

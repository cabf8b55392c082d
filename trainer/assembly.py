"""From the imported graph to what this rank computes: divided, cut into stages and units, recomputed, sharded.

    trainee -> horizontal -> pipeline -> units -> compile -> recomputation -> replicas

Each step is the identity where its size is 1. Every rank decides all of it from the same graph and the same example,
so nothing has to be agreed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainer import cut, graph
from trainer.config import RunConfig
from trainer.cut import Stage
from trainer.distributed import Coordinate, MPIContext, ParallelDims
from trainer.errors import CheckpointError
from trainer.horizontal import divide, plan_regions
from trainer.loss import Loss
from trainer.placement import Placement, slices
from trainer.reduce import Reducer, gradient
from trainer.trainee import Trainee
from trainer.weights import Weight, fill
from trainer.zero import Sharded


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
    trainee: Trainee, config: RunConfig, mesh: DeviceMesh, mpi: MPIContext, *, example: Sequence[Tensor]
) -> Assembly:
    """This rank's share of the trainee, on its device; the trainee's module is used up.

    example: the inputs of one micro-batch, the same shapes on every rank. Collective: every rank. Raises ConfigError
    or UnsupportedModel, on every rank alike, when the graph cannot be divided as configured.
    """
    module = trainee.module
    here = ParallelDims.of(config.parallel).coordinate(mpi.rank)
    stored = graph.weights(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    trained = frozenset(name for name, tensor in stored.items() if _is_trained(tensor))

    placements, vocabulary = _divide(module, config, mesh, here)
    stages, shared = _cut(module, config, here, example)
    for stage in stages:
        stage.chain.to(mpi.device)
    weights = _weights(stages, placements, shared, here)
    common = {
        "config": config.parallel,
        "mesh": mesh,
        "mpi": mpi,
        "shared": shared,
        "timeout_s": config.launch.collective_timeout_s,
    }
    reducer = Sharded(stages, weights, **common) if config.parallel.zero else Reducer(weights, **common)
    return Assembly(
        stages=stages,
        loss=Loss(config.model, module.output_names),
        reducer=reducer,
        shapes=shapes,
        trained_names=trained,
        shapes_of=lambda inputs: stages,
        tells=_told(weights, reducer.weights, mesh),
        total_squares=_total_squares(weights, reducer.weights, mesh, placements),
    )


def _divide(
    module: graph.ImportedGraph, config: RunConfig, mesh: DeviceMesh, here: Coordinate
) -> tuple[dict[str, Placement], None]:
    """Divide the layers over the horizontal axis; name -> which part of a divided weight this rank has from now on."""
    parallel = config.parallel
    group = mesh.get_group("horizontal").group_name
    regions = plan_regions(module, parallel.horizontal, convolutions=parallel.convolutions)
    return divide(module, regions, rank=here.horizontal, group=group), None


def _cut(module, config, here, example):
    return [cut.whole(module)], {}


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


# -- what this rank holds


def _weights(
    stages: Sequence[Stage], placements: Mapping[str, Placement], shared: Mapping[str, Sequence[int]], here: Coordinate
) -> list[Weight]:
    """Every stored tensor of the stages, once for each stage that uses it."""
    weights, seen = [], set[int]()
    for stage in stages:
        for part in stage.chain.parts:
            graph_of = next(each for each in part.module.modules() if hasattr(each, "onnx_names"))
            for path, name in graph_of.onnx_names.items():
                tensor = _tensor(graph_of, path)
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                first = (
                    all(weight.name != name for weight in weights)
                    and shared.get(name, [here.pipeline])[0] == here.pipeline
                )
                weights.append(
                    Weight(
                        name,
                        tensor,
                        placements.get(name) or Placement.whole(tensor.shape),
                        trained=_is_trained(tensor),
                        counted=first and (here.horizontal == 0 or name in placements),
                    )
                )
    return weights


def _tensor(module: nn.Module, path: str) -> Tensor:
    owner, _, leaf = path.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), leaf)
    return tensor


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
    horizontally = torch.tensor([weight.name in placements for weight in weights if weight.trained])
    sharded = torch.tensor(
        [part.placement != weight.placement for part, weight in zip(reducer, weights, strict=True) if weight.trained]
    )
    axes = [
        (mesh.get_group(axis), divided)
        for axis, divided in (("shard", sharded), ("horizontal", horizontally))
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

"""Build what one rank computes and stores, from the imported graph.

    trainable -> tensor parallel -> pipeline stages -> units -> recomputation -> torch.compile -> replicas (ZeRO)

    4 ranks, data 2 x pipeline 2          rank 0 and 1 hold stage 0, rank 2 and 3 hold stage 1

               stage 0 (a, b)    stage 1 (c, d)
    replica 0     rank 0            rank 2        RankModel.stages       what the pipeline engine runs
    replica 1     rank 1            rank 3        RankModel.reducer      sums gradients over the replicas

Each step is the identity where its size is 1. Every rank decides all of it from the same graph and the same example,
so the ranks need not exchange anything to agree.
"""

from __future__ import annotations

import gc
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
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.distributed.mesh import ParallelDims
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import TEACHER, Placement, Weight, checkpoint_key, slices
from onward.trainer.errors import ConfigError
from onward.trainer.model import precision
from onward.trainer.model.aligned_products import align_products
from onward.trainer.model.channels_last import WeightFormat, use_channels_last
from onward.trainer.model.in_place import relu_in_place
from onward.trainer.model.layer_scales import layer_scales
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.trainable import TrainableModel
from onward.trainer.onnx_graph.files.external_data import is_mapped, own_copy
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.parallel.compile_stages import compile_stages
from onward.trainer.parallel.cost import Autocast, estimate_costs
from onward.trainer.parallel.layout import Layout, build_layout, drop_data, recompute_units
from onward.trainer.parallel.part_sums import PartSums
from onward.trainer.parallel.pipeline.engine import Pipeline, stage_group
from onward.trainer.parallel.pipeline.stage import Stage, build_stages
from onward.trainer.parallel.planning.device_model import typical
from onward.trainer.parallel.replicas.norms import gradient
from onward.trainer.parallel.replicas.reducer import Reducer, is_statistic
from onward.trainer.parallel.replicas.zero import Sharded, is_sharded
from onward.trainer.parallel.stage_weights import is_trained, stored_places, stored_tensors
from onward.trainer.run.machine.this_machine import release_free_memory


@dataclass(frozen=True)
class RankModel:
    """What one rank computes, and all it stores."""

    stages: tuple[Stage, ...]
    losses: Losses
    reducer: Reducer | Sharded
    """Holds the weights and sums their gradients over all ranks."""
    shapes: Mapping[str, tuple[int, ...]]
    """Initializer name -> full shape, for every stored tensor of the whole model."""
    trained_names: frozenset[str]
    """Names of the weights that are trained, on whichever rank."""
    statistics_names: frozenset[str]
    """Names of the running statistics, on whichever rank."""
    layer_scales: Mapping[str, float]
    """Name of a trained weight -> factor on its learning rate; without a name it is 1."""
    shapes_of: Callable[[Sequence[Tensor]], Sequence[Stage]]
    """Graph inputs of a micro-batch -> this rank's stages, with the shapes that cross their borders for those."""
    reported_weights: frozenset[Weight]
    """The weights whose values this rank reports: exactly one rank reports each part."""
    part_sums: PartSums
    """Sums over the ranks that hold the other parts of this rank's trained weights."""
    matrices: Mapping[str, int]
    """Initializer name -> dimension of the output features, of the weights that Muon takes by default."""

    @property
    def trained(self) -> list[Weight]:
        """Return this rank's trained weights."""
        return [weight for weight in self.reducer.weights if weight.trained]

    @property
    def averaged(self) -> list[Weight]:
        """Return this rank's weights of which there may be a moving average: what changes during training."""
        names = self.trained_names | self.statistics_names
        return [weight for weight in self.reducer.weights if weight.name in names]

    @property
    def averaged_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return initializer name -> full shape, for every trained weight and running statistic of the whole model."""
        return {name: self.shapes[name] for name in self.trained_names | self.statistics_names}

    @property
    def _saved(self) -> list[Weight]:
        """Return the weights that checkpoints hold: a teacher's come from its file."""
        return [weight for weight in self.reducer.weights if not weight.name.startswith(TEACHER)]

    @property
    def num_parameters(self) -> int:
        """Return the number of trained elements of the whole model."""
        return sum(math.prod(self.shapes[name]) for name in self.trained_names)

    @property
    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return checkpoint key -> full shape, for every stored tensor of the whole model."""
        return {checkpoint_key(name): shape for name, shape in self.shapes.items() if not name.startswith(TEACHER)}

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return initializer name -> full shape, for every trained weight of the whole model."""
        return {name: self.shapes[name] for name in self.trained_names}

    def parts(self) -> dict[str, tuple[Tensor, Placement]]:
        """Return checkpoint key -> (tensor, placement) of what this rank holds of the model."""
        return {weight.checkpoint_key: (weight.tensor, weight.placement) for weight in self._saved}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts, which `checkpoint.load` returns for the placements of `parts()`, into the weights."""
        for weight in self._saved:
            weight.tensor.detach().copy_(tensors[weight.checkpoint_key])

    def full_weights(self, names: Collection[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return name -> (weight, gradient), full [*shapes[name]], fp32, of trained weights. Collective: every rank."""
        # sorted: every rank calls the all-reduces below in the same order
        found = {name: torch.zeros(2, *self.shapes[name]) for name in sorted(names)}
        for weight in self.trained:
            if weight.name in found and weight in self.reported_weights:
                for local, box in weight.placement.boxes():
                    found[weight.name][0][slices(box)] = weight.tensor.detach()[slices(local)]
                    found[weight.name][1][slices(box)] = gradient(weight)[slices(local)]
        # each element is filled in on exactly one rank and 0 on all others, so the sum is the value
        if dist.get_world_size() > 1:
            for pair in found.values():
                dist.all_reduce(pair)
        return {name: (weight, gradient) for name, (weight, gradient) in found.items()}


def build_rank_model(
    trainable: TrainableModel,
    config: RunConfig,
    mesh: DeviceMesh,
    mpi: MPIContext,
    *,
    example: Sequence[Tensor],
    one_shape: bool = False,
    beat: Callable[[], None] = lambda: None,
) -> RankModel:
    """Build this rank's part of the model on its device. The trainable's module must not be used afterwards.

    example: the inputs of one micro-batch, the same shapes on every rank. one_shape: whether all samples have the
    shapes of the example. beat: called before and after each compilation. Collective: every rank. Raises ConfigError
    or UnsupportedModel, with the same text on every rank, when the graph cannot be divided as configured.
    """
    if config.parallel.sequence_parallel and config.parallel.tensor > 1 and not one_shape:
        raise ConfigError(
            "parallel.sequence_parallel divides sequences of one length, and the samples of this data have several; "
            "pad them to one length, or set parallel.sequence_parallel = false"
        )
    module = trainable.module
    here = ParallelDims.of(config.parallel).coordinate(mpi.rank)
    stored = named_weights(module)
    autocast = partial(precision.autocast, config.precision, mpi.device)
    group = mesh.get_group("tensor").group_name
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    trained_names = frozenset(name for name, tensor in stored.items() if is_trained(tensor))
    statistics = [name for name, tensor in stored.items() if is_statistic(tensor)]
    statistics_names = frozenset(name for name in statistics if not name.startswith(TEACHER))
    del stored  # each weight is freed when this rank has taken its part

    scales = layer_scales(module, config.optimizer.layer_decay)  # of the graph before it is divided
    device = typical(mpi.device.type, config.precision.compute)
    layout = build_layout(module, config, example, rank=here.tensor, group=group, autocast=autocast, device=device)
    own = layout.of(here.pipeline, config.parallel.pipeline)
    _copy_shared_parameters(own)
    for stage in own:
        # the stages of this rank only: the full model may not fit on the device
        _move(stage.chain, mpi.device, but=_sharded_tensors(layout.weights([stage], here), config.parallel))
    choose_formats(layout, own, config, mpi.device)
    weights = layout.weights(own, here)
    recompute_units(layout, own, config, example, pipeline=here.pipeline)
    # the recomputation, too: the compiler then skips what the gradients do not need
    asked = config.graph, config.parallel, config.precision.compute
    compile_stages(own, module, *asked, example, device=mpi.device, one_shape=one_shape, autocast=autocast, beat=beat)
    # the own stages hold their weights by now; what else the graph still refers to would double the memory
    others = [stage.chain for stage in layout.stages if stage not in own]
    drop_data(owner for tree in (module, *others) for owner in tree.modules())
    gc.collect()  # what the import made refers to itself in circles
    release_free_memory()
    half = precision.COMPUTE.get(config.precision.compute)
    replicas = partial(Sharded, own, half=half) if config.parallel.zero else Reducer
    reducer = replicas(
        weights,
        mesh=mesh,
        mpi=mpi,
        config=config.parallel,
        shared=layout.shared,
        timeout_s=config.collective_timeout_s,
    )
    release_free_memory()  # ZeRO has copied units one after the other
    return RankModel(
        stages=tuple(own),
        losses=Losses(
            config.losses,
            module.output_names,
            module.output_shapes,
            classes=layout.classes,
            replicas=mesh.get_group("data"),
            soft=config.soft_losses,
            compiled=config.graph.compiles and mpi.device.type == "cuda",
        ),
        reducer=reducer,
        shapes=shapes,
        trained_names=trained_names,
        statistics_names=statistics_names,
        layer_scales=scales,
        shapes_of=partial(_stages_for_inputs, module, own, layout.stages, autocast),
        reported_weights=_reported_weights(weights, reducer.weights, mesh),
        part_sums=PartSums(weights, reducer.weights, mesh, layout.placements),
        matrices=layout.matrices,
    )


def build_pipeline(
    model: RankModel,
    parallel: ParallelConfig,
    arithmetic: PrecisionConfig,
    mesh: DeviceMesh,
    mpi: MPIContext,
    timeout_s: float,
) -> Pipeline:
    """Return the engine that runs this rank's stages. timeout_s: of its messages. Collective: every rank."""
    return Pipeline(
        model.stages,
        model.losses,
        schedule=parallel.schedule,
        stages_for=model.shapes_of,
        autocast=partial(precision.autocast, arithmetic, mpi.device),
        device=mpi.device,
        group_pipeline=stage_group(mesh, timeout_s=timeout_s),
        group_data=mesh.get_group("data"),
        counts_loss=ParallelDims.of(parallel).coordinate(mpi.rank).tensor == 0,
    )


def _sharded_tensors(weights: Sequence[Weight], parallel: ParallelConfig) -> set[Tensor]:
    """Return the weights that ZeRO shards. They stay on the host until `Sharded` moves them, unit by unit."""
    if not parallel.zero:
        return set()
    return {weight.tensor for weight in weights if is_sharded(weight, zero=parallel.zero)}


def _move(chain: nn.Module, device: torch.device, *, but: Collection[Tensor]) -> None:
    """Move parameters and buffers to the device, except those in `but`."""
    # Module.to would make copies of a buffer that several modules share
    moved: dict[Tensor, Tensor] = {}

    def place(tensor: Tensor) -> Tensor:
        if tensor in but:
            return tensor
        if tensor not in moved:
            # training changes weights in place, and the file that they are mapped from is let go
            moved[tensor] = own_copy(tensor) if device.type == "cpu" and is_mapped(tensor) else tensor.to(device)
        return moved[tensor]

    chain._apply(place)  # type: ignore[no-untyped-call]


# -- what runs where


def choose_formats(layout: Layout, stages: Sequence[Stage], config: RunConfig, device: torch.device) -> None:
    """Choose the memory format of the units of some stages and align their products; ReLUs overwrite their operands."""
    # the fused kernel takes weights in any order; other rules split them, or hash the positions of their elements
    stores_any_order = config.optimizer.name in ("adam", "adamw") and config.optimizer.moments == "fp32"
    for part in [part for stage in stages for part in stage.chain.parts]:
        # FSDP2 has weights at other addresses in each pass: what would be kept of a step are copies of all
        format: WeightFormat = "each" if config.parallel.zero else "stored" if stores_any_order else "once"
        graph = cast("ImportedGraph", part.module)
        rows = config.micro_batch_size
        use_channels_last(graph, config.graph, device, rows=rows, weights=format, but=layout.shared)
        # `selective` may keep what a ReLU would overwrite, and `compressed` looks for ReLUs first
        if config.recompute.mode != "selective" and not config.recompute.compresses:
            relu_in_place(graph)
        align_products(graph, device)


def _stages_for_inputs(
    module: ImportedGraph,
    own: Sequence[Stage],
    stages: Sequence[Stage],
    autocast: Autocast,
    inputs: Sequence[Tensor],
) -> list[Stage]:
    """Return this rank's stages with the shapes that cross their borders for other inputs."""
    # not in training mode: BatchNorm refuses a single row there
    node_costs = estimate_costs(module, inputs, autocast=autocast, training=False)
    # only the shapes at the borders are new: the chains and their weights stay
    again = build_stages(module, [stage.chain.parts for stage in stages], node_costs)
    return [
        replace(stage, received_meta=again[stage.index].received_meta, output_meta=again[stage.index].output_meta)
        for stage in own
    ]


def _copy_shared_parameters(stages: Sequence[Stage]) -> None:
    """Give each stage of this rank its own copy of a parameter that an earlier stage of this rank holds as well.

    Only interleaved schedules have several stages on one rank. Their backward passes overlap, so each stage needs a
    gradient of its own.
    """
    # names of the stages so far: the first stage keeps the parameter itself
    held: set[str] = set()
    for stage in stages:
        copies = {}
        for name, tensor in stored_tensors(stage).items():
            if name in held and isinstance(tensor, nn.Parameter):
                copies[name] = nn.Parameter(own_copy(tensor), requires_grad=tensor.requires_grad)
        held |= stored_tensors(stage).keys()
        for name, module, attribute in stored_places(stage):
            if name in copies:
                setattr(module, attribute, copies[name])


# -- what this rank holds


def _reported_weights(weights: Sequence[Weight], held: Sequence[Weight], mesh: DeviceMesh) -> frozenset[Weight]:
    """Return the weights that this rank reports.

    All replicas hold the same of a weight that ZeRO does not shard, so replica 0 reports it. Of one that ZeRO shards,
    each rank of the first sharding group reports its part.
    """
    first_replica = mesh.get_local_rank("data") == 0
    first_group = mesh.get_local_rank("replicate") == 0
    reported = set()
    for part, weight in zip(held, weights, strict=True):
        is_divided = part.placement != weight.placement
        is_reported_here = first_group if is_divided else first_replica
        if part.counted and is_reported_here:
            reported.add(part)
    return frozenset(reported)

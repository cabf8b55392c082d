"""Estimate configurations of one model, and do once what several of them have in common.

`parallel.sizes = "auto"` estimates some twenty configurations. They differ in the sizes of the axes, the micro-batches,
ZeRO and recomputation, so that much is equal:

    the graph, divided               for each `parallel.tensor`
    the cost of each node            for each `parallel.tensor` and number of rows
    a dry run of a stage             for each different stage (stage_key.py): of a pipeline of equal layers, the first,
                                     the last and one between them
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.images.image_inputs import box_column
from onward.trainer.data.input_columns import Feed, InputColumns
from onward.trainer.data.schema.box_cells import HEAD_NUMBERS
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.data.schema.target_counts import counted_targets, labels_of
from onward.trainer.data.storage.sharding import try_first_rows
from onward.trainer.distributed.mesh import Coordinate
from onward.trainer.model import precision
from onward.trainer.model.losses.loss import Losses
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.cost import NodeCost
from onward.trainer.parallel.layout import DividedGraph, check_replicas, cut, divide, find_cuts, recompute_units
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.planning.cluster import THIS_MACHINE, Cluster
from onward.trainer.parallel.planning.device_model import planned_device, typical
from onward.trainer.parallel.planning.dry_run import DryRun, dry_run
from onward.trainer.parallel.planning.layout_estimate import Estimate, RankEstimate
from onward.trainer.parallel.planning.stage_key import stage_key
from onward.trainer.parallel.planning.stage_memory import RankMemory


class Arithmetic(NamedTuple):
    """What all ranks compute together."""

    flops_of_row: float
    num_nodes: int


class Estimator:
    """Estimates configurations of one model.

    module: whose graph is copied for each division, with parameters on the meta device. device: of this machine, on
    which the dry runs are. cluster: what is planned for, if it names a GPU. The configurations may differ in sizes,
    micro-batches, ZeRO, recomputation and memory, and in nothing else.
    """

    def __init__(
        self,
        module: ImportedGraph,
        device: torch.device,
        cluster: Cluster = THIS_MACHINE,
        signature: Signature | None = None,
    ) -> None:
        self._module = module
        self._device = device
        self._cluster = cluster
        self.signature = signature
        """Of the trained part; None = the file is read where it is needed."""
        self._divided: dict[int, DividedGraph] = {}
        """By `parallel.tensor`."""
        self._costs: dict[tuple[int, int], Mapping[str, NodeCost]] = {}
        """By `parallel.tensor` and the rows of a micro-batch."""
        self._batches: dict[int, tuple[list[Tensor], list[Tensor | None]]] = {}
        """By the rows of a micro-batch."""
        self._dry_runs: dict[Hashable, DryRun] = {}
        self.whole: Arithmetic | None = None
        """Of the graph that is not divided; None before it was estimated."""

    def estimate(self, config: RunConfig) -> Estimate:
        """Divide the graph as configured, and estimate what it takes. Raises the errors of `build_layout`."""
        rows = config.micro_batch_size
        if rows not in self._batches:
            self._batches[rows] = example_batch(config, self.signature)
        inputs, labels = self._batches[rows]
        device = self._device
        parallel = config.parallel
        autocast = partial(precision.autocast, config.precision, device)
        check_replicas(self._module, parallel)
        size = parallel.tensor
        # as training does; `describe` knows this machine's GPU, which may not be that of every rank
        usual = typical("cuda" if self._cluster.gpu else device.type, config.precision.compute)
        if size not in self._divided:
            # in place, and other sizes begin with the whole graph
            whole = copy.deepcopy(self._module)
            # where shards are unequal, the last rank has the largest
            self._divided[size] = divide(whole, config, rank=size - 1, group="tensor", device=usual)
        divided = self._divided[size]
        known = self._costs.get((parallel.tensor, rows))
        cuts = find_cuts(divided.module, parallel, config.recompute, inputs, autocast, with_costs=True, known=known)
        self._costs[parallel.tensor, rows] = cuts.node_costs
        layout = cut(divided, cuts, parallel, usual)
        # the weights of "balanced" are known from the whole data only, and need no memory
        plain = [
            each.model_copy(update={"class_weights": ()}) if each.class_weights == "balanced" else each
            for each in config.losses
        ]
        module = divided.module
        soft = config.soft_losses
        losses = Losses(plain, module.output_names, module.output_shapes, classes=layout.classes, soft=soft)

        def batch_loss(outputs: Sequence[Tensor]) -> Tensor:
            on_device = [None if each is None else each.to(device) for each in labels]
            return losses.weighted(losses(outputs, on_device, rows))

        def run(stage: Stage) -> DryRun:
            is_last = stage.index == stage.num_stages - 1
            key = stage_key(stage, inputs), (parallel.tensor, rows) if is_last else ()
            if key not in self._dry_runs:
                loss = batch_loss if is_last else None
                self._dry_runs[key] = dry_run(stage, inputs, autocast, device=device, loss=loss)
            return self._dry_runs[key]

        batch_bytes = sum(value.nbytes for value in (*inputs, *labels) if value is not None)
        ranks = []
        for pipeline in range(parallel.pipeline):
            stages = layout.of(pipeline, parallel.pipeline)
            weights = layout.weights(stages, Coordinate(pipeline, 0, 0))
            recomputed = recompute_units(layout, stages, config, inputs, pipeline=pipeline)
            dry_runs = [run(stage) for stage in stages]
            memory = RankMemory(stages, weights, config, pipeline=pipeline, batch_bytes=batch_bytes)
            ranks.append(RankEstimate(stages, weights, recomputed, dry_runs, memory.at_peak(dry_runs)))
        planned = planned_device(self._cluster, device, config.precision.compute)
        estimate = Estimate(config, layout, ranks, batch_bytes, planned, self._cluster)
        if parallel.tensor == 1 and self.whole is None:
            stages = [stage for rank in ranks for stage in rank.stages]
            num_nodes = sum(len(part.nodes) for stage in stages for part in stage.chain.parts)
            self.whole = Arithmetic(sum(estimate.stage_flops(stage, ()) for stage in stages) / rows, num_nodes)
        return estimate


def example_batch(config: RunConfig, signature: Signature | None = None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return inputs and labels of each loss, [B, ...] or None: zeros, as long as the longest first row."""
    signature = signature or read_training_signature(config.model)
    schema = try_first_rows(config, signature)[0]
    matched = InputColumns(config.data, config.loss, config.model, signature)
    text = matched.text
    boxes = box_column(config.data, config.losses)

    def zeros(feed: Feed) -> Tensor:
        columns = [schema[name] for name in feed.columns]
        row = (*columns[0].shape, len(columns)) if feed.stacked else (1,) if feed.is_one_column else columns[0].shape
        row = feed.image.sample_shape if feed.image else feed.mask or row
        if feed.columns == (boxes,) and config.data.image:
            # a batch has them without the size of the image in front, and of all images that are put together
            row = ((row[0] - HEAD_NUMBERS) * config.data.image.augment.joined,)
        if text and text.block_mask and feed.columns == (text.block_mask.name,):
            row = (*(1,) * (len(text.block_mask.shape or ()) - 3), *row, *row)
        return torch.zeros(config.micro_batch_size, *row, dtype=getattr(torch, feed.tensor_dtype))

    tensors = [zeros(feed) for feed in matched.feeds()]
    num_inputs = len(signature.inputs)
    inputs = tensors[:num_inputs]
    labels = labels_of(config.losses, iter(tensors[num_inputs:]))
    masks = dict(zip([info.name for info in signature.inputs], inputs, strict=True))
    counted = [counted_targets(each, config.losses, labels, masks.get(each.mask)) for each in config.soft_losses]
    keys = [torch.zeros(config.micro_batch_size, 2, dtype=torch.int64)] * signature.draws
    return [*inputs, *keys], [*labels, *counted]

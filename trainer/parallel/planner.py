"""`onward plan`: how the ranks would divide the work, what each would hold and send, told without starting any.

The graph is divided, cut and marked by the code that training uses, and each rank's stages are rehearsed
(trainer/parallel/memory.py). `auto` does that for every division of the ranks, and takes the quickest that fits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.input_columns import Feed, feeds
from onward.trainer.data.sharding import infer_schema
from onward.trainer.data.signature import read_training_signature
from onward.trainer.distributed.processes import Coordinate, free_memory
from onward.trainer.distributed.weights import Weight, shape_of
from onward.trainer.errors import ConfigError
from onward.trainer.model import precision
from onward.trainer.model.loss import Loss
from onward.trainer.model.trainable import open_trainable
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.layout import Arrangement, arrange, recompute_units
from onward.trainer.parallel.memory import Rehearsal, foretell, rehearse, sharding
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.plan_record import Memory, Plan, PlannedRegion, PlannedStage, Traffic
from onward.trainer.parallel.tensor.regions import FLOPS_PER_BYTE


def plan(config: RunConfig) -> Plan:
    """How a run would be divided; with `parallel.sizes = "auto"`, how it is best divided.

    Loads the model and looks at the first rows of the data. Raises ConfigError when the graph cannot be divided as
    configured or nothing fits into memory, UnsupportedModel when its shapes depend on data.
    """
    device = torch.device("cuda" if config.launch.device != "cpu" and torch.cuda.is_available() else "cpu")
    module = open_trainable(config).module
    for owner in module.modules():
        for name, tensor in owner.named_parameters(recurse=False):
            setattr(owner, name, shape_of(tensor))
    planner = _Planner(module, device)
    return planner.choose(config) if config.parallel.sizes == "auto" else planner.plan(config).record()


# -- one division


@dataclass(frozen=True)
class _Rank:
    """The ranks of one pipeline coordinate."""

    stages: list[Stage]
    weights: list[Weight]
    recomputed: list[tuple[int, ...]]
    rehearsals: list[Rehearsal]
    memory: Memory


@dataclass(frozen=True)
class _Division:
    """One configuration, planned."""

    config: RunConfig
    whole: Arrangement
    ranks: list[_Rank]
    batch_bytes: int

    def with_zero(self, zero: int) -> _Division:
        """The same with another ZeRO."""
        config = _with(self.config, parallel={"zero": zero})
        memories = [
            foretell(
                rank.rehearsals, rank.stages, rank.weights, config, pipeline=pipeline, batch_bytes=self.batch_bytes
            )
            for pipeline, rank in enumerate(self.ranks)
        ]
        ranks = [replace(rank, memory=memory) for rank, memory in zip(self.ranks, memories, strict=True)]
        return replace(self, config=config, ranks=ranks)

    @property
    def name(self) -> str:
        parallel, steps = self.config.parallel, self.config.train.gradient_accumulation_steps
        how = f"{_named(parallel.model_dump())}, ZeRO {parallel.zero}, {steps} micro-batches"
        return how + ("" if self.config.recompute.mode == "none" else f", recompute {self.config.recompute.mode}")

    @property
    def peak(self) -> int:
        return max(rank.memory.peak for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """(p - 1) / (v m + p - 1): Narayanan et al. 2021, section 2.2."""
        parallel = self.config.parallel
        waits = parallel.pipeline - 1
        return waits / (parallel.stages_per_rank * self.config.train.gradient_accumulation_steps + waits)

    def flops(self, stage: Stage, recomputed: Sequence[int]) -> int:
        """Forward and backward passes of one micro-batch; a whole unit's forward pass counts twice if recomputed."""
        units = [sum(self.whole.cuts.priced[name].flops for name in part.nodes) for part in stage.chain.parts]
        again = sum(units[number] for number in recomputed) if self.config.recompute.mode == "whole" else 0
        return 3 * sum(units) + again

    def amount(self) -> float:
        """How long a step takes, in FLOPs: what the busiest rank computes and waits, and what it sends meanwhile."""
        steps = self.config.train.gradient_accumulation_steps
        computed = max(
            sum(map(self.flops, rank.stages, rank.recomputed))
            + sum(CALL_FLOPS * len(part.nodes) for stage in rank.stages for part in stage.chain.parts)
            for rank in self.ranks
        )
        sent = sum(each.bytes for each in self.traffic())
        return float(steps * computed / (1 - self.bubble) + FLOPS_PER_BYTE * sent)

    # -- what is sent

    def traffic(self) -> Iterator[Traffic]:
        """Of the rank that sends most through each axis."""
        steps = self.config.train.gradient_accumulation_steps
        parallel = self.config.parallel
        collectives = [[size for found in rank.rehearsals for _, size in found.collectives] for rank in self.ranks]
        most = max(collectives, key=sum)
        if parallel.tensor > 1:
            if most:
                yield _sent("tensor", "all-reduce of activations", steps * len(most), steps * sum(most))
            common = max(self.ranks, key=lambda rank: sum(w.tensor.nbytes for w in self._common(rank)))
            alike = list(self._common(common))
            if alike:
                yield _sent("tensor", "gradients of weights that are whole", 1, sum(w.tensor.nbytes for w in alike))
        if parallel.pipeline > 1:
            ahead = max((stage for rank in self.ranks for stage in rank.stages), key=_sends)
            back = sum(value.requires_grad for value in ahead.output_meta)
            per_rank = steps * parallel.stages_per_rank
            yield _sent("pipeline", "activations", per_rank * len(ahead.output_meta), per_rank * _sends(ahead))
            gradients = sum(value.nbytes for value in ahead.output_meta if value.requires_grad)
            yield _sent("pipeline", "their gradients", per_rank * back, per_rank * gradients)
            sizes = {w.name: w.tensor.nbytes for rank in self.ranks for w in rank.weights if w.trained}
            tied = [sizes[name] for name in self.whole.shared if name in sizes]
            if tied:
                yield _sent("pipeline", "gradients of tied weights", 2 * len(tied), 2 * sum(tied))
        if parallel.data > 1:
            yield from max((list(self._replicas(rank)) for rank in self.ranks), key=lambda of: sum(t.bytes for t in of))

    def _common(self, rank: _Rank) -> Iterator[Weight]:
        return (weight for weight in rank.weights if weight.trained and weight.name not in self.whole.placements)

    def _replicas(self, rank: _Rank) -> Iterator[Traffic]:
        """Of each all-reduce, twice its bytes travel; of a gather or a scatter, once."""
        parallel, steps = self.config.parallel, self.config.train.gradient_accumulation_steps
        trained = sum(weight.tensor.nbytes for weight in rank.weights if weight.trained)
        if not parallel.zero:
            factor = 1.0 if parallel.compression == "none" else 0.5
            yield _sent("data", f"gradients ({parallel.reduction})", 1, int(2 * factor * trained))
            return
        found = sharding(rank.stages, rank.weights, parallel)
        gathers = 2 * steps if parallel.zero == 3 else 1
        scatters = 1 if parallel.zero == 1 else steps
        yield _sent("data", "weights gathered", gathers * len(found.units), gathers * found.whole)
        yield _sent("data", "gradients scattered", scatters * len(found.units), scatters * found.trained)
        if found.size < parallel.data:
            yield _sent("data", "gradients between groups", len(found.units), 2 * found.trained // found.size)

    # -- what is told

    def record(self, *, limit: int = 0, considered: Iterable[str] = ()) -> Plan:
        config, parallel = self.config, self.config.parallel
        stages = sorted(
            (
                self._stage(stage, coordinate, recomputed)
                for coordinate, rank in enumerate(self.ranks)
                for stage, recomputed in zip(rank.stages, rank.recomputed, strict=True)
            ),
            key=lambda stage: stage.stage,
        )
        words, regions = self.whole.words, self.whole.regions
        divided = [PlannedRegion(kind=each.kind, weights=(*each.columns, *each.rows)) for each in regions.regions]
        if words.weights:
            divided.append(PlannedRegion(kind="vocabulary", weights=words.weights))
        reasons = {**dict(regions.replicated), **dict(words.replicated)}
        return Plan(
            parallel=parallel,
            recompute=config.recompute,
            gradient_accumulation_steps=config.train.gradient_accumulation_steps,
            micro_batch_size=config.micro_batch_size,
            stages=tuple(stages),
            memory=tuple(rank.memory for rank in self.ranks),
            memory_bytes=limit or int(parallel.memory_gib * 2**30),
            regions=tuple(divided),
            whole=tuple((name, why) for name, why in reasons.items() if name not in self.whole.placements),
            traffic=tuple(self.traffic()),
            bubble=self.bubble,
            considered=tuple(considered),
        )

    def _stage(self, stage: Stage, coordinate: int, recomputed: Sequence[int]) -> PlannedStage:
        here = [weight for weight in self.ranks[coordinate].weights if isinstance(weight.tensor, nn.Parameter)]
        own = {id(tensor) for tensor in stage.chain.parameters()}
        nodes = [(part.module, name) for part in stage.chain.parts for name in part.nodes]
        return PlannedStage(
            stage=stage.index,
            rank=coordinate,
            begins=_shown(*nodes[0]) if nodes else "",
            ends=_shown(*nodes[-1]) if nodes else "",
            flops=self.flops(stage, recomputed),
            parameters=sum(weight.placement.numel for weight in here if id(weight.tensor) in own),
            sends=_sends(stage),
            recomputed=len(recomputed),
            units=len(stage.chain.parts),
        )


def _sends(stage: Stage) -> int:
    last = stage.index == stage.num_stages - 1
    return 0 if last else sum(value.nbytes for value in stage.output_meta)


def _sent(axis: str, what: str, count: int, size: int) -> Traffic:
    return Traffic(axis=axis, what=what, count=count, bytes=size)


def _shown(module: nn.Module, name: str) -> str:
    """What the file calls a node's result."""
    assert isinstance(module, fx.GraphModule)
    node = next(node for node in module.graph.nodes if node.name == name)
    return next(iter(node.meta.get("onnx", ())), name)


# -- the best division

AXES = ("data", "tensor", "pipeline")
CALL_FLOPS = 1e6
"""What it costs to call one operator, however small: 10 µs at 100 GFLOP/s."""


class _Planner:
    """Divides one graph in many ways."""

    def __init__(self, module: ImportedGraph, device: torch.device) -> None:
        self.module, self.device = module, device

    def plan(self, config: RunConfig) -> _Division:
        """One division, to the end."""
        inputs, labels = example(config)
        autocast = partial(precision.autocast, config.precision, self.device)
        module = copy.deepcopy(self.module)
        whole = arrange(
            module,
            config,
            inputs,
            rank=config.parallel.tensor - 1,  # its share is the largest
            group="tensor",
            autocast=autocast,
            price=True,
        )
        loss = Loss(config.model, module.output_names, classes=whole.classes)

        def finish(outputs: Sequence[Tensor]) -> Tensor:
            return loss(outputs, None if labels is None else labels.to(self.device), config.micro_batch_size)

        batch_bytes = sum(value.nbytes for value in inputs) + (0 if labels is None else labels.nbytes)
        ranks = []
        for pipeline in range(config.parallel.pipeline):
            stages = whole.of(pipeline, config.parallel.pipeline)
            weights = whole.weights(stages, Coordinate(pipeline, 0, 0))
            recomputed = recompute_units(whole, stages, config, inputs, pipeline=pipeline)
            rehearsals = [
                rehearse(
                    stage,
                    inputs,
                    autocast,
                    device=self.device,
                    finish=finish if stage.index == stage.num_stages - 1 else None,
                )
                for stage in stages
            ]
            memory = foretell(rehearsals, stages, weights, config, pipeline=pipeline, batch_bytes=batch_bytes)
            ranks.append(_Rank(stages, weights, recomputed, rehearsals, memory))
        return _Division(config, whole, ranks, batch_bytes)

    def choose(self, config: RunConfig) -> Plan:
        """The quickest of all divisions of the ranks that fit into memory."""
        num_ranks = config.launch.num_ranks
        on_this = 1 if config.launch.hostfile or self.device.type == "cuda" else num_ranks
        limit = int(config.parallel.memory_gib * 2**30) or free_memory(self.device) // on_this
        given = {axis: size for axis in AXES if (size := getattr(config.parallel, axis)) != 1}
        if given:
            raise ConfigError(
                "parallel.sizes = 'auto' chooses the sizes, but given is "
                f"{', '.join(f'parallel.{axis} = {size}' for axis, size in given.items())}; leave one of the two out"
            )
        found: list[_Division] = []
        considered: list[str] = []
        for sizes in divisions(num_ranks):
            try:
                found.append(self._fitting(_with(config, parallel=sizes), limit))
            except ConfigError as error:
                considered.append(f"{_named(sizes)}: {error}")
        if not found:
            raise ConfigError(
                [
                    f"no division of {num_ranks} ranks fits into {_gib(limit)} a rank; take more ranks, a smaller "
                    "train.global_batch_size, or raise parallel.memory_gib",
                    *considered,
                ]
            )
        best = min(found, key=_Division.amount)
        for division in found:
            if division is not best:
                times = division.amount() / best.amount()
                considered.append(f"{division.name}: {_gib(division.peak)}, a step takes {times:.2f} times as long")
        chosen = _with(best.config, parallel={"memory_gib": config.parallel.memory_gib or limit / 2**30})
        return self.plan(chosen).record(limit=limit, considered=considered)

    def _fitting(self, config: RunConfig, limit: int) -> _Division:
        """The plainest division of these sizes that fits: with more micro-batches, with ZeRO, with recomputation.

        Raises ConfigError where none does.
        """
        parallel = config.parallel
        own = (parallel.reduction, parallel.transport, parallel.compression) == ("sum", "torch", "none")
        own = own and parallel.schedule != "zero_bubble"
        zeros = range(parallel.zero, 4) if parallel.data > 1 and own else range(1)
        for count in _micro_batches(config):
            given = _with(config, train={"gradient_accumulation_steps": count}, parallel={"zero": zeros[-1]})
            division = self.plan(given)
            for zero in zeros:
                division = division.with_zero(zero)
                if division.peak <= limit:
                    return division
        for mode in ("selective", "whole") if self.device.type == "cuda" else ("whole",):  # selective pays on GPUs
            wanted = _with(division.config, recompute={"mode": mode}, parallel={"memory_gib": limit / 2**30})
            with contextlib.suppress(ConfigError):  # as much as there is to recompute is not enough
                division = self.plan(wanted)
                if division.peak <= limit:
                    return division
        raise ConfigError(f"takes {_gib(division.peak)} at least")


def divisions(num_ranks: int) -> list[dict[str, int]]:
    """All products of three sizes, few stages first."""
    sizes = range(1, num_ranks + 1)
    return [
        {"data": num_ranks // (pipeline * tensor), "tensor": tensor, "pipeline": pipeline}
        for pipeline in sizes
        for tensor in sizes
        if num_ranks % (pipeline * tensor) == 0
    ]


def _micro_batches(config: RunConfig) -> list[int]:
    """How many micro-batches one replica's samples may be: at first enough to fill the pipeline, then ever more.

    Raises ConfigError when there are none.
    """
    parallel, batch = config.parallel, config.train.global_batch_size
    share, rest = divmod(batch, parallel.data)
    fits = [count for count in range(parallel.pipeline, share + 1) if share % count == 0]
    if rest or not fits:
        raise ConfigError(f"{batch} samples (train.global_batch_size) do not divide like that")
    wanted = 4 * parallel.pipeline if parallel.pipeline > 1 else config.train.gradient_accumulation_steps
    chosen = [next((count for count in fits if count >= wanted), fits[-1])]
    for count in fits:
        if count >= 2 * chosen[-1]:
            chosen.append(count)
    return chosen


def _with(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    changed = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in sections.items()}
    return config.model_copy(update=changed)


def _named(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {sizes[axis]}" for axis in AXES)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def example(config: RunConfig) -> tuple[list[Tensor], Tensor | None]:
    """Inputs and labels of one micro-batch, all zeros: of the shapes of the data's first rows, the longest of them."""
    schema = infer_schema(config.data)

    def tensor(feed: Feed) -> Tensor:
        columns = [schema[name] for name in feed.columns]
        row = (len(columns),) if feed.stacked else columns[0].shape
        return torch.zeros(config.micro_batch_size, *row, dtype=getattr(torch, feed.tensor_dtype))

    tensors = list(map(tensor, feeds(config, read_training_signature(config.model))))
    return (tensors, None) if config.model.loss == "output" else (tensors[:-1], tensors[-1])

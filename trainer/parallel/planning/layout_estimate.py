"""One division of the ranks with its estimated memory, messages and time of a step.

Formulas, for p pipeline ranks with v stages each and m micro-batches:

    bubble             the share of a step in which a rank waits, as in config/pipeline_schedules.py
    time of a step     m x (pass of the busiest rank) / (1 - bubble) + messages that are waited for
    messages           the times of cluster.py
    on a GPU           gradients and gathered weights are sent beside the passes: waited for is what takes longer than
                       these, and at least one bucket or unit, which is sent when nothing is left to compute
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from onward.trainer.config.run_config import RunConfig
from onward.trainer.distributed.weights import Weight
from onward.trainer.parallel.layout import Layout
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.planning.cluster import THIS_MACHINE, Cluster, collective_s, group_of
from onward.trainer.parallel.planning.device_model import Device, reserve
from onward.trainer.parallel.planning.dry_run import DryRun
from onward.trainer.parallel.planning.plan_record import Memory, Plan, PlannedRegion, PlannedStage, Reserve, Traffic
from onward.trainer.parallel.planning.stage_memory import RankMemory, zero_sharding

BUCKET_BYTES = 25 << 20
"""About the size in which gradients are sent over NCCL (replicas/reducer.py)."""


@dataclass(frozen=True)
class RankEstimate:
    """The ranks of one pipeline coordinate; all need the same memory and time."""

    stages: list[Stage]
    weights: list[Weight]
    recomputed: list[tuple[int, ...]]
    """For each stage the numbers of the units that the backward pass computes again."""
    dry_runs: list[DryRun]
    memory: Memory


@dataclass(frozen=True)
class Estimate:
    """One configuration with its estimated memory, time and traffic."""

    config: RunConfig
    layout: Layout
    ranks: list[RankEstimate]
    """By pipeline coordinate."""
    batch_bytes: int
    """Size of the data of one micro-batch."""
    device: Device
    """What the times are estimated for."""
    cluster: Cluster = THIS_MACHINE
    """The hosts of the ranks."""

    def with_zero(self, zero: int) -> Estimate:
        """Return the same with another ZeRO stage, which needs no further dry run."""
        parallel = self.config.parallel.model_copy(update={"zero": zero})
        config = self.config.model_copy(update={"parallel": parallel})
        # activations are the same for every ZeRO stage: only the memory of weights is counted again
        ranks = []
        for pipeline, rank in enumerate(self.ranks):
            memory = RankMemory(rank.stages, rank.weights, config, pipeline=pipeline, batch_bytes=self.batch_bytes)
            ranks.append(replace(rank, memory=memory.at_peak(rank.dry_runs)))
        return replace(self, config=config, ranks=ranks)

    @property
    def num_micro_batches(self) -> int:
        return self.config.train.gradient_accumulation_steps

    @property
    def name(self) -> str:
        parallel = self.config.parallel
        recompute = "" if self.config.recompute.mode == "none" else f", recompute {self.config.recompute.mode}"
        return f"{parallel.layout}, ZeRO {parallel.zero}, {self.num_micro_batches} micro-batches{recompute}"

    @property
    def peak_bytes(self) -> int:
        return max(rank.memory.peak for rank in self.ranks)

    def reserve(self, limit: int) -> Reserve:
        """Return what a rank with `limit` bytes keeps free for what is not the model's."""
        return reserve(self.config.parallel, self.device.type, limit)

    def fits(self, limit: int) -> bool:
        """Return whether a rank with `limit` bytes can do it."""
        return self.peak_bytes + self.reserve(limit).total <= limit

    @property
    def bubble(self) -> float:
        """Return the share of a step in which a rank waits."""
        parallel = self.config.parallel
        return parallel.order.bubble(parallel.pipeline_size(self.num_micro_batches))

    def stage_flops(self, stage: Stage, recomputed: Sequence[int]) -> int:
        """Return the FLOPs of one micro-batch: 3 times the forward pass, and recomputed units once more."""
        units = [sum(self.layout.cuts.node_costs[name].flops for name in part.nodes) for part in stage.chain.parts]
        # the other modes recompute no products
        repeated = sum(units[number] for number in recomputed) if self.config.recompute.mode == "whole" else 0
        return 3 * sum(units) + repeated

    def step_s(self) -> float:
        """Return the time of a step in seconds: of the busiest rank, with its waiting and its messages."""
        return self.compute_s() + self.waited_s()

    def compute_s(self) -> float:
        """Return the time of the passes of a step, in which ranks of a pipeline wait for each other as well."""
        return self.num_micro_batches * self._pass_s() / (1 - self.bubble)

    def _pass_s(self) -> float:
        """Return the time in which the busiest rank computes one micro-batch."""
        # the stages of a pipeline run at the pace of the slowest rank
        passes_s = []
        for rank in self.ranks:
            num_nodes = sum(len(part.nodes) for stage in rank.stages for part in stage.chain.parts)
            flops = sum(map(self.stage_flops, rank.stages, rank.recomputed))
            passes_s.append(self.device.pass_s(flops, num_nodes))
        return max(passes_s)

    def waited_s(self) -> float:
        """Return the time in which a rank does nothing but wait for messages of a step."""
        beside = [sent for sent in self.traffic() if sent.pieces]
        others_s = sum(self.message_s(sent) for sent in self.traffic() if not sent.pieces)
        beside_s = sum(map(self.message_s, beside))
        if self.device.type != "cuda":
            return others_s + beside_s
        # beside the last piece nothing is left to compute
        last_s = sum(self.message_s(sent) / sent.pieces for sent in beside)
        return others_s + max(beside_s - self._sending_s(), last_s)

    def _sending_s(self) -> float:
        """Return the time of the passes beside which gradients and weights are sent."""
        zero = self.config.parallel.zero
        # ZeRO 2 and 3 send in each micro-batch, the others in the last backward pass, two thirds of its time
        times = self.num_micro_batches if zero >= 2 else 2 / 3
        return times * self._pass_s()

    def message_s(self, sent: Traffic) -> float:
        """Return the time of messages, as if nothing were computed beside them."""
        group = group_of(sent.axis, self.config.parallel, self.config.launch, self.cluster)
        copies = self.device.copies if sent.axis == "data" else 1.0
        num_bytes = copies * sent.whole / max(sent.count, 1)
        each_s = collective_s(sent.collective, num_bytes, group, self.device.links)
        return sent.count * (each_s + self.device.message_s)

    # -- messages

    def traffic(self) -> Iterator[Traffic]:
        """Yield what one rank sends in one step through each axis: on each, of the rank that sends most."""
        parallel = self.config.parallel
        if parallel.tensor > 1:
            yield from self._tensor_traffic()
        if parallel.pipeline > 1:
            yield from self._pipeline_traffic()
        if parallel.data > 1:
            by_rank = [list(self._data_traffic(rank)) for rank in self.ranks]
            yield from max(by_rank, key=lambda traffic: sum(each.bytes for each in traffic))

    def _tensor_traffic(self) -> Iterator[Traffic]:
        # of the pipeline coordinate that sends most: each has its own tensor-parallel group
        most = max((_sent_sizes(rank.dry_runs) for rank in self.ranks), key=sum)
        if most:
            how = "reduce-scatter and all-gather" if self.config.parallel.sequence_parallel else "all-reduce"
            yield Traffic(
                axis="tensor",
                what=f"{how} of activations",
                count=self.num_micro_batches * len(most),
                bytes=self.num_micro_batches * sum(most),
                collective="all-reduce",
                whole=self.num_micro_batches * sum(most),
            )
        # all ranks of a tensor-parallel group hold copies of these, and exchange their gradients
        replicated = 0
        for rank in self.ranks:
            trained = [weight for weight in rank.weights if weight.trained]
            sizes = [weight.tensor.nbytes for weight in trained if weight.name not in self.layout.placements]
            replicated = max(replicated, sum(sizes))
        if replicated:
            yield Traffic(
                axis="tensor",
                what="gradients of replicated weights",
                count=1,
                bytes=replicated,
                collective="all-reduce",
                whole=replicated,
            )

    def _pipeline_traffic(self) -> Iterator[Traffic]:
        parallel = self.config.parallel
        # the stage with the largest output decides: the others wait for its messages
        stage = max((stage for rank in self.ranks for stage in rank.stages), key=sent_bytes)
        passes = self.num_micro_batches * parallel.stages_per_rank
        count = len(stage.output_meta)
        sent = passes * sent_bytes(stage)
        yield Traffic(axis="pipeline", what="activations", count=passes * count, bytes=sent, whole=sent)
        gradients = [value.nbytes for value in stage.output_meta if value.requires_grad]
        yield Traffic(
            axis="pipeline",
            what="gradients of activations",
            count=passes * len(gradients),
            bytes=passes * sum(gradients),
            whole=passes * sum(gradients),
        )
        weights = [weight for rank in self.ranks for weight in rank.weights]
        sizes = {weight.name: weight.tensor.nbytes for weight in weights if weight.trained}
        # the first and the last stage may hold the same weight, such as an embedding that is also the output head
        # twice: gradients go to the first stage, and their sum comes back
        tied = [sizes[name] for name in self.layout.shared if name in sizes]
        if tied:
            both = 2 * sum(tied)
            yield Traffic(
                axis="pipeline", what="gradients of tied weights", count=2 * len(tied), bytes=both, whole=both
            )

    def _data_traffic(self, rank: RankEstimate) -> Iterator[Traffic]:
        parallel = self.config.parallel
        if not parallel.zero:
            trained = sum(weight.tensor.nbytes for weight in rank.weights if weight.trained)
            # compression sends half precision
            # a ring sends each element twice (see above)
            factor = 2.0 if parallel.compression == "none" else 1.0
            yield Traffic(
                axis="data",
                what=f"gradients ({parallel.reduction})",
                count=1,
                bytes=int(factor * trained),
                collective="all-reduce",
                whole=int(factor * trained / 2),
                pieces=max(1, trained // BUCKET_BYTES),
            )
            return
        sharding = zero_sharding(rank.stages, rank.weights, parallel)
        num_units = len(sharding.unit_bytes)
        trained = sharding.trained_bytes
        # ZeRO 3 gathers for each forward and each backward pass; ZeRO 1 scatters once, others after each backward pass
        gathers = 2 * self.num_micro_batches if parallel.zero == 3 else 1
        scatters = 1 if parallel.zero == 1 else self.num_micro_batches
        sums = (("weights gathered", gathers, sharding.total_bytes), ("gradients scattered", scatters, trained))
        for what, times, size in sums:
            yield Traffic(
                axis="data",
                what=what,
                count=times * num_units,
                bytes=times * size,
                collective="gather or scatter",
                whole=times * size,
                pieces=max(1, times * num_units),
            )
        # each group of `parallel.shard` replicas holds all shards, and the groups all-reduce their gradients
        if sharding.num_shards < parallel.data:
            between = 2 * trained // sharding.num_shards
            yield Traffic(
                axis="data",
                what="gradients between groups",
                count=num_units,
                bytes=between,
                collective="all-reduce",
                whole=between // 2,
                pieces=max(1, num_units),
            )

    # -- the record

    def record(self, *, limit: int = 0, considered: Iterable[str] = ()) -> Plan:
        """Return the plan. limit: bytes that a rank may use. considered: what `auto` did not choose, and why."""
        config = self.config
        layout = self.layout
        limit = limit or int(config.parallel.memory_gib * 2**30)
        stages = [
            self._stage_record(stage, coordinate, recomputed)
            for coordinate, rank in enumerate(self.ranks)
            for stage, recomputed in zip(rank.stages, rank.recomputed, strict=True)
        ]
        regions = [
            PlannedRegion(kind=region.kind, weights=(*region.columns, *region.rows))
            for region in layout.regions.regions
        ]
        if layout.vocabulary.weights:
            regions.append(PlannedRegion(kind="vocabulary", weights=layout.vocabulary.weights))
        reasons = {**dict(layout.regions.replicated), **dict(layout.vocabulary.replicated)}
        # a weight that several nodes read may be replicated for one of them and sharded for another
        replicated = tuple((name, why) for name, why in reasons.items() if name not in layout.placements)
        return Plan(
            parallel=config.parallel,
            recompute=config.recompute,
            compute=config.precision.compute,
            gradient_accumulation_steps=config.train.gradient_accumulation_steps,
            micro_batch_size=config.micro_batch_size,
            stages=tuple(sorted(stages, key=lambda stage: stage.stage)),
            memory=tuple(rank.memory for rank in self.ranks),
            memory_bytes=limit,
            reserve=self.reserve(limit),
            device=self._device_text(),
            regions=tuple(regions),
            replicated=replicated,
            traffic=tuple(self.traffic()),
            bubble=self.bubble,
            step_s=self.step_s(),
            compute_s=self.compute_s(),
            cluster=None if self.cluster == THIS_MACHINE else self.cluster,
            considered=tuple(considered),
        )

    def _device_text(self) -> str:
        rate = self.device.flops_per_s / 1e12
        link = self.device.link_bytes_per_s / 1e9
        said = f"{self.device.name}, {rate:.3g} TFLOP/s in {self.config.precision.compute}, {link:.3g} GB/s"
        if self.cluster.hosts == 1:
            return said
        network = f"{self.device.network_bytes_per_s / 1e9:.3g} GB/s and {1e6 * self.device.network_latency_s:.3g} us"
        hosts = f"{self.cluster.hosts} hosts of {self.cluster.ranks_per_host}"
        return f"{said} inside a host; {hosts}, {network} between them"

    def _stage_record(self, stage: Stage, coordinate: int, recomputed: Sequence[int]) -> PlannedStage:
        parameters = set(stage.chain.parameters())
        weights = [weight for weight in self.ranks[coordinate].weights if weight.tensor in parameters]
        num_parameters = sum(weight.placement.numel for weight in weights)
        nodes = [(part.module, name) for part in stage.chain.parts for name in part.nodes]
        return PlannedStage(
            stage=stage.index,
            rank=coordinate,
            begins=_file_name(*nodes[0]) if nodes else "",
            ends=_file_name(*nodes[-1]) if nodes else "",
            flops=self.stage_flops(stage, recomputed),
            parameters=num_parameters,
            sends=sent_bytes(stage),
            recomputed=len(recomputed),
            units=len(stage.chain.parts),
        )


def _sent_sizes(dry_runs: Sequence[DryRun]) -> list[int]:
    """Return the size of each all-reduce; of an all-gather or a reduce-scatter half, which is what it sends of that."""
    collectives = [collective for run in dry_runs for collective in run.collectives]
    return [size if name == "all_reduce" else size // 2 for name, size in collectives]


def sent_bytes(stage: Stage) -> int:
    """Return the bytes that a stage sends to the next one for one micro-batch."""
    is_last = stage.index == stage.num_stages - 1
    return 0 if is_last else sum(value.nbytes for value in stage.output_meta)


def _file_name(module: nn.Module, node_name: str) -> str:
    """Return the name of a node's result in the ONNX file, or in the fx graph where the file has none."""
    assert isinstance(module, fx.GraphModule)
    node = next(node for node in module.graph.nodes if node.name == node_name)
    return next(iter(node.meta.get("onnx", ())), node_name)

"""Compute what a run needs at least: memory of a rank, size of a checkpoint and of the exported file.

The bytes of one rank are a lower bound for the largest of all ranks: every weight is counted as if it were divided
evenly over all ranks that may divide it. With n = shards of ZeRO, m = tensor x pipeline ranks:

    weights      W / m     (ZeRO 3: W / (m n))
    gradients    T / m     (ZeRO 2 and 3: T / (m n))
    optimizer    O / m     (ZeRO: O / (m n)), with the moving average

W, T and O are of all weights, of the trained ones and of the optimizer's state, as in
trainer/parallel/planning/stage_memory.py, which estimates the peak of a step from a dry run.
"""

from __future__ import annotations

from onward.trainer.config.run_config import RunConfig
from onward.trainer.distributed.weights import TEACHER, Placement, Weight
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.optim.state import state_bytes
from onward.trainer.parallel.matrices import find_matrices
from onward.trainer.parallel.replicas.reducer import is_statistic
from onward.trainer.parallel.stage_weights import is_trained
from onward.trainer.run.records import Needs


def least_needs(module: ImportedGraph, config: RunConfig, *, size_bytes: int, kept_bytes_per_row: float = 0.0) -> Needs:
    """Return the needs of a run that trains this module, with its teacher if it has one.

    size_bytes: of its file and its external data. kept_bytes_per_row: what a forward pass of one row keeps for the
    backward pass; 0 = not measured.
    """
    stored = {name: tensor for name, tensor in named_weights(module).items() if not name.startswith(TEACHER)}
    trained = {name: tensor for name, tensor in stored.items() if is_trained(tensor)}
    matrices = find_matrices(module) if config.optimizer.name == "muon" else {}
    state = state_bytes(
        config.optimizer,
        [
            Weight(name, tensor, Placement.full(tensor.shape), trained=True, outputs=matrices.get(name))
            for name, tensor in trained.items()
        ],
    )
    own, gradients = (sum(tensor.nbytes for tensor in tensors.values()) for tensors in (stored, trained))
    statistics = sum(tensor.nbytes for tensor in stored.values() if is_statistic(tensor))
    average = gradients + statistics if config.average.kind != "none" else 0
    parallel = config.parallel
    parts = parallel.tensor * parallel.pipeline
    shards = (parallel.shard or parallel.data) if parallel.zero else 1
    rank = own // (shards if parallel.zero >= 3 else 1)
    rank += gradients // (shards if parallel.zero >= 2 else 1)
    rank += (state + average) // shards
    # a graph that is divided or computed again keeps less than what was measured on the whole
    is_whole = parts == 1 and config.recompute.mode == "none" and not config.graph.compile
    return Needs(
        rank_bytes=rank // parts,
        activation_bytes=int(kept_bytes_per_row * config.micro_batch_size) if is_whole else 0,
        checkpoint_bytes=own + state + average,
        model_bytes=size_bytes,
    )

"""Begin an attempt where the run has come to: with its newest complete checkpoint, or as its configuration says.

checkpoints of the run      `checkpoint.load`      the attempt begins
step 20, step 40            -                      after step 40
none                        another run's step 60  after that step; evaluations and hours count from here
none                        ""                     at step 0
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from onward.trainer.checkpoint.load import load, verify_together
from onward.trainer.checkpoint.resume import find_resume_point
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.write_plan import TensorPart
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.training import AverageConfig, OptimizerConfig, PrecisionConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import check_fit
from onward.trainer.events import Heartbeat
from onward.trainer.optim.averages import Averages, average_shapes
from onward.trainer.optim.loss_scaler import LossScaler
from onward.trainer.optim.optimizers import build_optimizer
from onward.trainer.optim.state import load_optimizer_parts, optimizer_parts, optimizer_shapes
from onward.trainer.parallel.rank_model import RankModel
from onward.trainer.run.directory import RunDir


@dataclass(frozen=True)
class Trained:
    """All that training changes, on this rank."""

    model: RankModel
    optimizer: torch.optim.Optimizer
    averages: Averages
    scaler: LossScaler

    @classmethod
    def begin(
        cls,
        model: RankModel,
        optimizer: OptimizerConfig,
        average: AverageConfig,
        precision: PrecisionConfig,
        *,
        seed: int,
        num_steps: int,
        device: torch.device,
    ) -> Trained:
        """Return what training changes, before its first step. num_steps: of the whole run."""
        updates = build_optimizer(
            optimizer,
            model.trained,
            seed=seed,
            elsewhere=model.trained_names,
            parts=model.part_sums,
            layer_scales=model.layer_scales,
        )
        averages = Averages(average, model.averaged, num_steps=num_steps, device=device, swapped=model.reducer.regather)
        return cls(model, updates, averages, LossScaler(precision))

    def parts(self) -> dict[str, TensorPart]:
        """Return checkpoint key -> the tensor itself, which training changes in place, and its placement."""
        optimizer = optimizer_parts(self.optimizer, self.model.trained)
        return self.model.parts() | optimizer | self.averages.parts()


@dataclass(frozen=True)
class Restored:
    """Where an attempt begins."""

    state: TrainState
    resumed: str
    """One sentence; "" of a run that has not begun before."""
    damaged: tuple[str, ...]
    """Newer checkpoints of the run that are damaged."""


def restore(
    trained: Trained, run: RunDir, config: RunConfig, *, num_rows: int, mpi: MPIContext, heartbeat: Heartbeat
) -> Restored:
    """Load the checkpoint that the attempt begins with into weights, optimizer, averages and loss scale.

    num_rows: of the training data. Collective: every rank; each reads its own parts, and nothing is broadcast. Raises
    CheckpointError or ConfigError, with the same text on every rank, for a checkpoint that does not fit.
    """
    beat = heartbeat.beat
    checkpoint, damaged, resumed = find_resume_point(run, mpi=mpi, step_before=heartbeat.step_before, beat=beat)
    is_of_this_run = checkpoint is not None
    if checkpoint is None and config.checkpoint.load:
        checkpoint = verify_together(Path(config.checkpoint.load).resolve(), mpi=mpi, beat=beat)
        resumed = f"begins with checkpoint {checkpoint.path} of another run, at step {checkpoint.info.step}"
    if checkpoint is None:
        state = TrainState(step=0, samples_seen=0, scaler=trained.scaler.state(), metrics={})
        return Restored(state, resumed, damaged)

    model = trained.model
    name = f"checkpoint {checkpoint.path}"
    stored, averaged = average_shapes(config.average, model.averaged_shapes, name, checkpoint.shapes)
    optimizer = optimizer_shapes(config.optimizer, model.trained_shapes, model.matrices)
    expected = model.checkpoint_shapes | optimizer | averaged
    check_fit(name, stored, expected)
    checkpoint.manifest.state.check_reachable(name, config.train, num_rows=num_rows)
    placements = {key: placement for key, (_, placement) in trained.parts().items() if key in expected}
    state, tensors = load(checkpoint, placements, beat=beat)
    model.load(tensors)
    load_optimizer_parts(trained.optimizer, model.trained, tensors)
    trained.averages.load(tensors)
    if not is_of_this_run:
        state = state.as_start()
    trained.scaler.restore(state.scaler)
    return Restored(state, resumed, damaged)

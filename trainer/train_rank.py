"""Train as one rank of a job: from the launcher's environment to result.json."""

from __future__ import annotations

import logging
import signal
import socket

from onward.trainer.distributed.failures import (
    StopSignal,
    install_excepthook,
    trace_collectives,
    write_stacks_when_ended,
    write_tracebacks,
)
from onward.trainer.distributed.launched import launched_rank
from onward.trainer.distributed.processes import connect, disconnect
from onward.trainer.errors import Stopped
from onward.trainer.events import Heartbeat
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.kept_settings import refuse_edited
from onward.trainer.run.machine.node_usage import recorded_usage
from onward.trainer.run.records import write_record

log = logging.getLogger("onward.trainer")


def train_rank(run: RunDir, *, until: int = 0) -> int:
    """Train as one rank of the current attempt. Every rank of the job calls it.

    until: stop, with a checkpoint, after this step; 0 = train to the end.
    """
    # The `train` task counts the attempts; a job that was started by hand begins the first one itself.
    if launched_rank() in (None, 0) and not run.current_attempt:
        run.begin_attempt()
    attempt = run.current_attempt or 1
    stop = StopSignal()
    heartbeat = Heartbeat(run.heartbeat)
    install_excepthook(run, attempt=attempt, step=lambda: heartbeat.step)
    traceback = write_tracebacks(run.traceback(attempt, launched_rank() or 0))
    write_stacks_when_ended(run.stack(attempt, launched_rank() or 0))
    trace_collectives(run.attempt(attempt) / "collectives-rank-")
    given = read_config(run, "given")
    refuse_edited(run, config=given)
    config = read_config(run, given=given)
    mpi = connect(
        expected_world_size=config.world_size,
        timeout_s=config.collective_timeout_s,
        device=config.launch.device,
        threads=config.launch.threads_per_rank,
        ranks_per_gpu=config.launch.ranks_per_gpu,
    )
    log.info("attempt %d: rank %d of %d on %s, %s", attempt, mpi.rank, mpi.world_size, socket.gethostname(), mpi.device)
    heartbeat.start(
        rank=mpi.rank,
        timeout_s=config.launch.heartbeat_timeout_s,
        start_timeout_s=config.launch.start_timeout_s,
        compile_timeout_s=config.compile_timeout_s,
        traceback=traceback,
    )

    # After `connect` has checked the world size: these imports take seconds.
    from onward.trainer.distributed.arithmetic import named_if_not_deterministic
    from onward.trainer.loop import train
    from onward.trainer.parallel.observing.memory_snapshot import memory_snapshots

    def stop_requested() -> bool:
        return stop.requested or 0 < until <= heartbeat.step

    usage = recorded_usage(run, attempt=attempt, rank=mpi.rank, local_rank=mpi.local_rank, host=mpi.host)
    memory = memory_snapshots(config.monitor, run, mpi, attempt=attempt)
    with named_if_not_deterministic(), usage, memory:
        result = train(run, mpi, attempt=attempt, heartbeat=heartbeat, stop_requested=stop_requested, given=config)
    # This file is the only proof of success; the exit status of mpirun is none.
    if mpi.rank == 0:
        write_record(run.result(attempt), result)
    # srun ends the other ranks once one has exited with 75, and the handler of a signal may crash a Python that ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # after the result is written: a rank that hangs while it leaves must not hide a success
    disconnect()
    run.reserved_for(attempt, mpi.rank).unlink(missing_ok=True)
    return 0 if result.status == "done" else Stopped.exit_code

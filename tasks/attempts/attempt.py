"""One attempt of the training job, from its number to the record of how it ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from onward.infra.job.hosts import read_hostfile, silence, silent_hosts
from onward.infra.job.job import Outcome, now_ms, num_oom_kills
from onward.infra.job.launcher import LaunchError
from onward.infra.job.slurm_jobs import allocation, batch_job
from onward.tasks.attempts.attempt_failure import log_tail, record_first_ending
from onward.tasks.attempts.attempt_kind import Evidence, classify, sentence_of
from onward.tasks.attempts.hang import record_hang
from onward.tasks.attempts.retry_policy import newest_checkpoint, plan_next
from onward.tasks.attempts.wait_before_retry import wait_for_storage
from onward.tasks.launching.jobs import launcher_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.errors import OnwardError
from onward.trainer.events import last_beat
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import AttemptHistory, RunHistory
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, EndingKind
from onward.trainer.run.outcomes.ending_kinds import PEER_ADDRESS, memory_advice
from onward.trainer.run.outcomes.storage import storage_error, storage_problem
from onward.trainer.run.records import AttemptResult, RankError, RuntimeReport, read_record
from onward.trainer.run.reserved import reserve, write_reserved

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """An attempt that has begun, and the state of the run directory at that time."""

    run: RunDir
    config: RunConfig
    number: int
    began_ms: int
    events_at: int
    """Bytes of the event log."""
    checkpoint: int
    """Step of the newest checkpoint, which the attempt tries first."""
    oom_kills: int

    @classmethod
    def begin(cls, run: RunDir, config: RunConfig) -> Attempt:
        """Make the next attempt the one that may write to the run directory."""
        last = run.current_attempt
        # an attempt without a record had a flow that was killed: its end is recorded before the next begins
        if last and not run.ending(last).exists():
            began_ms = int(run.fence.stat().st_mtime * 1000)
            cls(run, config, last, began_ms, 0, 0, 0).end_of_killed_flow()
        number = run.begin_attempt()
        # now, because the record must be written also when the disk is full at the end
        reserve(run.reserved_for(number))
        run.heartbeat.unlink(missing_ok=True)  # its step is that of the attempt before
        events_at = run.events.stat().st_size if run.events.exists() else 0
        return cls(run, config, number, now_ms(), events_at, newest_checkpoint(run), num_oom_kills())

    @contextlib.contextmanager
    def recorded_if_interrupted(self) -> Iterator[None]:
        """Write the record of an attempt that an exception ends: Ctrl-C, a cancellation, a job that cannot start."""
        try:
            yield
        except LaunchError as error:
            self._write("user_error", str(error))
            raise
        except OSError as error:
            storage = storage_error(error, self.run.root)
            # no rank has run, so only the disk of this process can say why
            kind: EndingKind = "storage" if storage else "unknown"
            self._write(kind, f"the job could not be started: {storage or error}", by_itself=False)
            raise
        except BaseException:
            self.end(Outcome(None, "stopped", 0.0, now_ms()))
            raise

    def end(self, outcome: Outcome, *, asked: str = "") -> AttemptEnding:
        """Find out how the attempt ended and what follows; write its record, and log it in one line.

        asked: why this process has asked the ranks to save and exit, in words; "" if it has not.
        """
        config = self.config
        oom_kills = num_oom_kills() - self.oom_kills
        result = result_of(self.run, self.number)
        output = log_tail(self.run, self.number)
        error = None
        disk = ""
        silent = {}
        # with a result the ranks have ended by themselves, and nothing has to be found out
        if result is None:
            with contextlib.suppress(OSError):  # of a full disk
                # a hang first: its error record names the cause, where the others name consequences
                if not record_hang(self.run, self.number, config.launch, config.world_size, outcome, output):
                    advice = memory_advice(config)
                    record_first_ending(
                        self.run, self.number, config.launch, output, oom_kills=oom_kills, advice=advice
                    )
            error = self.run.first_error(self.number)
            disk = storage_problem(self.run.root)
            silent = dict(outcome.lost_hosts)
            if outcome.reason not in ("stopped", "host_lost"):
                silent = _silent_hosts(config.launch, error)
        evidence = Evidence(
            result=result,
            outcome=outcome,
            error=error,
            oom_kills=oom_kills,
            said=launcher_of(config.launch).read_ending(output, outcome.returncode),
            ending=self.described(outcome),
            disk=disk,
            hosts=silence(silent) if silent else "",
            peer=_peer_of(self.run, error),
            asked=asked,
        )
        kind = classify(evidence)
        by_slurm = kind == "preempted" and not asked and bool(batch_job())
        return self._write(
            kind,
            sentence_of(evidence),
            # what Slurm ends it starts again, with all of the job; a retry would be ended with it
            by_itself=not by_slurm,
            result=result,
            error=error,
            silent=silent,
            detected_ms=min(error.at_ms, outcome.detected_ms) if error else outcome.detected_ms,
        )

    def described(self, outcome: Outcome) -> str:
        """Describe how the job ended, for a failure without an error record of a rank."""
        launch = self.config.launch
        start = launch.start_timeout_s
        silence = launch.heartbeat_timeout_s
        compiling = f"; while compiling {self.config.compile_timeout_s:g} s" * self.config.graph.compiles
        if start > silence:
            compiling = f"; until the first step is complete {start:g} s, launch.start_timeout_s{compiling}"
        return {
            "exited": f"{launcher_of(launch).name} ended with status {outcome.returncode} without a result",
            "stopped": "it was stopped",
            "host_lost": "killed after a host was lost",
            "silent": f"killed after {silence:g} s without a heartbeat (launch.heartbeat_timeout_s{compiling})",
            "out_of_time": f"the ranks were asked to end before job {allocation()} of Slurm does",
            "start_timeout": f"killed after {start:g} s without a first heartbeat (launch.start_timeout_s)",
        }[outcome.reason]

    def end_of_killed_flow(self) -> None:
        """Write the record of an attempt whose flow was killed before it could."""
        result = result_of(self.run, self.number)
        kind: EndingKind = "rank_lost"
        saved = "and the ranks did not save"
        if result:
            kind = "done" if result.status == "done" else "preempted"
            saved = "but the ranks saved"
        self._write(kind, f"the flow's process was killed, {saved}", result=result, by_itself=False)

    def _write(
        self,
        kind: EndingKind,
        sentence: str,
        *,
        result: AttemptResult | None = None,
        error: RankError | None = None,
        silent: Mapping[str, str] = MappingProxyType({}),
        detected_ms: int | None = None,
        by_itself: bool = True,
    ) -> AttemptEnding:
        """Write the record. by_itself: whether another attempt may follow by itself."""
        # from where the log ended when the attempt began: the rest is of earlier ones
        history = RunHistory.of(self.run.events, offset=self.events_at, series=())
        logged = history.attempts.get(self.number, AttemptHistory(self.number))
        rank, host = None, ""
        # the log is written every few steps, so heartbeat and error record may know of a later one
        steps = [logged.last_step, last_beat(self.run.heartbeat).step]
        if error:
            steps.append(error.step)
            rank, host = error.rank, error.host
        # who has only lost another one is not who failed
        if peer := _peer_of(self.run, error):
            rank, host = None, peer
        resumed_from = logged.start.step if logged.start else self.checkpoint
        ending = AttemptEnding(
            attempt=self.number,
            kind=kind,
            sentence=sentence,
            action="`onward resume` continues it",
            rank=rank,
            host=host,
            silent_hosts=dict(silent),
            step=result.step if result else max(steps),
            resumed_from=resumed_from,
            checkpoint=newest_checkpoint(self.run),
            began_ms=self.began_ms,
            detected_ms=detected_ms or now_ms(),
            ended_ms=now_ms(),
        )
        if by_itself:
            ending = plan_next(self.run, ending, self.config)
        reserved = self.run.reserved_for(self.number)
        try:
            write_reserved(self.run.ending(self.number), ending, reserved)
        except OSError:
            # a retry counts the records of its predecessors, so it waits until this one is written
            if ending.retry:
                wait_for_storage(self.run)
                write_reserved(self.run.ending(self.number), ending, reserved)
        log.log(logging.INFO if kind in ("done", "stopped") else logging.WARNING, "%s", ending)
        return ending


def _silent_hosts(launch: LaunchConfig, error: RankError | None) -> dict[str, str]:
    """Return the hosts that do not answer, if a lost host may explain what the ranks say."""
    explained = error and not error.secondary and not error.cause.startswith(("SIG", "Hang"))
    if not launch.hostfile or explained:
        return {}
    return silent_hosts(list(read_hostfile(Path(launch.hostfile))))


def _peer_of(run: RunDir, error: RankError | None) -> str:
    """Return the host that a rank lost its connection to, if it has only lost one; "" if that is not known."""
    found = PEER_ADDRESS.search(error.cause) if error and error.secondary else None
    if found is None or not run.runtime.exists():
        return ""
    ranks = read_record(run.runtime, RuntimeReport).ranks
    return next((rank.host for rank in ranks if rank.address == found[1]), "")


def result_of(run: RunDir, attempt: int) -> AttemptResult | None:
    """Return what rank 0 wrote at the end of an attempt; None if it wrote nothing that can be read."""
    try:
        return read_record(run.result(attempt), AttemptResult)
    except OnwardError:
        return None

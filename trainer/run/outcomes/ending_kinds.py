"""The one table of how attempts and runs end: how each kind is recognised, whether a retry helps, and what to do.

    an error of Onward                 its class: `errors`; of a rank `rank_errors`, too
    an error of torch, CUDA or NCCL    its text, which `explain` turns into an error of Onward and a sentence
    no error: a signal, silence        how the launcher saw the end (tasks/attempts/attempt_kind.py)
    no record of the flow              which process held the run's lock (flows/run_state/why_run_ended.py)

Texts decide where no class does: a kernel fails long after it was started, and NCCL's watchdog ends its process without
an exception. The exit status is that of the error; EXIT_STATUSES has the meaning of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from onward.trainer.errors import DeviceAssertion, OnwardError, OutOfMemory, TrainingFailed

if TYPE_CHECKING:
    from onward.trainer.config.run_config import RunConfig

EndingKind: TypeAlias = Literal[
    "done",
    "stopped",
    "user_error",
    "data_error",
    "out_of_memory",
    "non_finite",
    "hang",
    "rank_lost",
    "host_lost",
    "preempted",
    "storage",
    "server",
    "unknown",
]
"""The kinds of an attempt. A run may end in the further ones of ENDINGS, too."""

MAKE_ROOM = "make room (`onward gc` lists what may go)"

# -- texts by which an ending is recognised

TIMED_OUT = re.compile(
    r"Timed out (waiting|after)|(has|monitor) timed out|[Ww]ait timeout|"
    r"(Socket|Application|operation|collective) [Tt]imeout|a collective timed out|it made no progress for"
)
"""A rank waited in vain for another one: as gloo, TCPStore, NCCL and `explain` say it."""
PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited|nccl(Remote|System)Error|"
    rf"NCCL communicator (was aborted|encountered error)|{TIMED_OUT.pattern}"
)
"""What torch says on a rank whose peer has ended or does not answer."""
PEER_ADDRESS = re.compile(r"Connection (?:closed|reset) by peer \[(?:::ffff:)?([\da-f.:]+?)\]", re.IGNORECASE)
"""Where gloo says at which address the peer was."""
SILENT_HOSTS = re.compile("not answer:|hosts? cannot be used:")
"""What `silence` of infra/job/hosts.py says of hosts."""
SILENT_SERVER = re.compile(r"(MLflow|Prefect) .*cannot be reached", re.DOTALL)
WATCHDOG = re.compile(r"^Timeout \((\d+:\d+:\d+(?:\.\d+)?)\)!", re.MULTILINE)
"""What faulthandler writes for a rank that has made no progress, and for how long."""
SIGNED = re.compile(r"(?:\[rank(\d+)\]:|rank (\d+): )")
"""How a line of a log begins that a rank has written; the lines below it are of the same rank."""
PRINTED_ERROR = re.compile(
    r"^rank (?P<rank>\d+): (?P<text>(?P<header>Traceback \(most recent call last\):\n(?:[ \t].*\n)*)?"
    r"(?:[\w.]*\.)?(?P<cause>\w+(?:: .*)?))(?(header)$|(?=\n\n(?:During handling|The above exception)))",
    re.MULTILINE,
)
"""An error as the exception hook of a rank prints it, before it writes its record. The first of a chain of errors may
have no traceback."""
_NO_MEMORY = re.compile(
    r"(CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"DefaultCPUAllocator: can't allocate memory)(?:(?! If reserved but unallocated).)*"
)
_KERNEL = re.compile(r"[^\s:/]+\.cuh?:\d+: .*?Assertion `.*?` failed")
_CUDA = re.compile(r"CUDA error: ([^\n]+)")
_COLLECTIVE = re.compile(r"collective operation timeout: Work\w+\(SeqNum=(\d+), OpType=(\w+).*? ran for (\d+) milli")
_NCCL = re.compile(r"(NCCL error[^\n]*|nccl\w+Error[^\n]*)")


# -- the table


@dataclass(frozen=True, kw_only=True)
class EndingRule:
    """How a kind of ending is recognised, and what follows it."""

    errors: tuple[str, ...] = ()
    """The classes of the errors that end a flow, or a rank, so."""
    rank_errors: tuple[str, ...] = ()
    """Further classes, if a rank has raised them."""
    no_retry: str = ""
    """Why an attempt that followed would end so again, or has nothing to do; "" if a retry may help."""
    to_do: str = "{goes_on}"
    """What to do; `goes_on` stands for the command that continues the run, with the step at which it does."""


ENDINGS: Mapping[str, EndingRule] = {
    "done": EndingRule(no_retry="its last checkpoint is saved"),
    "stopped": EndingRule(errors=("Stopped",), rank_errors=("Fenced",), no_retry="`onward resume` continues it"),
    "user_error": EndingRule(
        errors=("ConfigError", "UnsupportedModel", "Refused"),
        rank_errors=("RuntimeUnavailable", "CheckpointError"),
        no_retry="a retry would be refused again",
        to_do="correct what is listed. A run keeps the configuration that it began with: start a new run",
    ),
    "data_error": EndingRule(
        errors=("DataError", "DeviceAssertion"),
        no_retry="a retry would read the same data again",
        to_do="correct the rows that are named, and start a new run",
    ),
    "out_of_memory": EndingRule(
        errors=("OutOfMemory",),
        rank_errors=("MemoryError",),
        no_retry="a retry would need as much memory again",
        to_do="change what the message lists, and start a new run; where more memory is free, {goes_on}",
    ),
    "non_finite": EndingRule(
        errors=("Diverged",),
        no_retry="a retry would do the same again",
        to_do="it would diverge again: lower optimizer.learning_rate, set train.clip_norm, or look at the rows that "
        "are named; start a new run",
    ),
    "hang": EndingRule(
        errors=("Hang",),
        to_do="look at the line that is named (`onward logs` shows the stacks of all ranks); {goes_on}",
    ),
    "rank_lost": EndingRule(errors=("ReplicasDiffer",)),
    "host_lost": EndingRule(to_do="start the host again, or take it out of launch.hostfile; {goes_on}"),
    "preempted": EndingRule(),
    "storage": EndingRule(errors=("StorageUnavailable",), to_do=f"{MAKE_ROOM} or repair the disk; {{goes_on}}"),
    "server": EndingRule(
        errors=("ServerUnavailable",),
        rank_errors=(
            *("ConnectionError", "ConnectionRefusedError", "ConnectTimeout", "ReadTimeout", "HTTPError", "URLError"),
        ),
        to_do="start the server again (Onward's own: `onward up`); {goes_on}",
    ),
    "unknown": EndingRule(to_do="the traceback is in flow.log (`onward logs`); {goes_on}"),
    # -- of runs alone
    "machine": EndingRule(errors=("RuntimeUnavailable",), to_do="correct what is listed; {goes_on}"),
    "checkpoint": EndingRule(
        errors=("CheckpointError", "RecordError"), to_do="if a disk failed, replace it; {goes_on}"
    ),
    "export_refused": EndingRule(
        errors=("ExportRefused",),
        no_retry="the file would be refused again",
        to_do="the checkpoints are unchanged: read which check failed, and by how much; {goes_on}",
    ),
    "fenced": EndingRule(
        errors=("Fenced",), no_retry="a newer attempt has the run", to_do="nothing: a newer attempt has the run"
    ),
    "killed": EndingRule(),
    "power_loss": EndingRule(),
}


def kind_of_error(name: str) -> str:
    """Return the kind of the ending of a run by the class of its error; "unknown" if the class says nothing."""
    return next((kind for kind, rule in ENDINGS.items() if name in rule.errors), "unknown")


def kind_of_rank_error(name: str) -> EndingKind:
    """Return the kind of the ending of an attempt by the class of a rank's error; "unknown" if it says nothing."""
    # only the kinds of attempts: a rank's RuntimeUnavailable is `user_error`, and a run's is `machine`
    kinds: tuple[EndingKind, ...] = get_args(EndingKind)
    return next((kind for kind in kinds if name in ENDINGS[kind].errors + ENDINGS[kind].rank_errors), "unknown")


def would_end_again(name: str) -> bool:
    """Return whether a run that an error of this class has ended would end so again if it went on as it is."""
    return bool(ENDINGS[kind_of_error(name)].no_retry)


def has_own_cause(name: str) -> bool:
    """Return whether an error of this class has a cause of its own, whatever the disks look like."""
    # a file that cannot be read back fails the checks of the export, too
    return would_end_again(name) and name != "ExportRefused"


@dataclass(frozen=True)
class ExitStatus:
    """An exit status of the commands."""

    meaning: str
    to_do: str


_WHEN_WANTED = "`onward resume`, when it should go on"
_IF_BEGUN = "after saving a checkpoint, if training had begun; `onward resume` continues"
EXIT_STATUSES: Mapping[int, ExitStatus] = {
    0: ExitStatus("done", ""),
    1: ExitStatus(
        "unexpected error; of `onward diff`: the files differ",
        "report it, with the file that the message names: it has the traceback",
    ),
    2: ExitStatus("invalid command line, configuration, model or data", "correct each thing that is listed"),
    3: ExitStatus(
        "the machine cannot run it: MPI, servers, devices, memory or disk",
        "correct what is listed, such as a full disk or a port in use; then `onward resume`, or the command again",
    ),
    4: ExitStatus(
        "a checkpoint or a record of a run is damaged, missing, or of another model",
        "`onward resume`: an earlier checkpoint is used. If all are damaged or of another model, start a new run",
    ),
    5: ExitStatus(
        "the trained file failed a check and was not written",
        "the checkpoints are unchanged: read which check failed, by how much, and change `[export]` or the model",
    ),
    6: ExitStatus(
        "the loss or a gradient is not finite",
        "a resume would diverge again: lower `optimizer.learning_rate`, clip gradients (`train.clip_norm`), "
        "or examine the data of the step that is named; start a new run",
    ),
    7: ExitStatus(
        "a rank needs more memory than its device has free",
        "change what the message lists, such as `train.gradient_accumulation_steps`, and start a new run",
    ),
    8: ExitStatus(
        "a GPU kernel was given an index out of range, such as a label that is no class",
        "correct the labels or ids in the data, and start a new run",
    ),
    70: ExitStatus(
        "training failed; `onward resume` continues from the newest checkpoint",
        "read the cause (`onward status`), then `onward resume`",
    ),
    72: ExitStatus(
        "a newer attempt has taken over the run directory",
        "nothing: the newer attempt has the run. `onward status` shows it",
    ),
    75: ExitStatus("stopped after saving a checkpoint; `onward resume` continues", _WHEN_WANTED),
    130: ExitStatus(f"stopped by Ctrl-C {_IF_BEGUN}", _WHEN_WANTED),
    143: ExitStatus(f"stopped by SIGTERM {_IF_BEGUN}", _WHEN_WANTED),
}
"""Exit status -> what help texts and the reference say of it."""


# -- errors by their text


@dataclass(frozen=True)
class Cause:
    """Why a rank failed."""

    kind: type[OnwardError]
    """TrainingFailed if a retry may help."""
    sentence: str


def explain(text: str) -> Cause | None:
    """Return the cause that a message, or the last output of a rank, describes; None if it is none of these."""
    # in this order: what follows from an earlier failure comes after it
    if "device-side assert triggered" in text:
        return Cause(DeviceAssertion, _assertion(text))
    if found := _NO_MEMORY.search(text):
        # torch's message has the numbers: what was asked for, and what is free, allocated and reserved
        return Cause(OutOfMemory, " ".join(found[0].split()))
    if found := _CUDA.search(text):
        return Cause(TrainingFailed, f"a GPU failed: {found[1].strip()}")
    if found := _COLLECTIVE.search(text):
        waited = f"{found[2]} number {found[1]} waited {int(found[3]) / 1000:g} s for the other ranks"
        return Cause(TrainingFailed, f"a collective timed out: {waited} (five sixths of launch.heartbeat_timeout_s)")
    if found := _NCCL.search(text):
        return Cause(TrainingFailed, found[1].strip())
    if found := WATCHDOG.search(text):
        limits = (
            "launch.heartbeat_timeout_s; until the first step was complete, launch.start_timeout_s; while it "
            "compiled, at least half an hour"
        )
        return Cause(TrainingFailed, f"it made no progress for {found[1]} ({limits})")
    return None


def _assertion(text: str) -> str:
    kernel = _KERNEL.search(text)
    return (
        "a GPU kernel was given an index out of range, such as a label or token id beyond the model's table (CUDA "
        f"device-side assert{f': {kernel[0]}' if kernel else ''}); compare the least and greatest label or id of the "
        "data with the shapes that `onward doctor` lists. With CUDA_LAUNCH_BLOCKING=1 in the environment the traceback "
        "names the operator"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch, CUDA or Python has got no more memory."""
    # Python's own, of the host's memory
    if isinstance(error, MemoryError):
        return True
    # torch has no class of its own for an allocation that fails on the CPU
    cause = explain(str(error)) if isinstance(error, RuntimeError) else None
    return cause is not None and cause.kind is OutOfMemory


def memory_advice(config: RunConfig) -> str:
    """Return what to change so that a rank needs less memory, with the present values."""
    parallel = config.parallel
    size = config.micro_batch_size
    choices = []
    if size > 1:
        # the cheapest change first: the global batch stays as it is
        steps = config.train.gradient_accumulation_steps
        choices.append(f"raise train.gradient_accumulation_steps (now {steps}: a micro-batch has {size} samples)")
    if config.recompute.mode == "none" or config.recompute.compresses:
        choices.append("set recompute.mode = 'whole'")
    if parallel.data > 1 and parallel.zero < 3:
        choices.append(f"raise parallel.zero (now {parallel.zero})")
    if config.precision.compute not in ("bf16", "fp16"):
        choices.append(f"set precision.compute = 'bf16' (now {config.precision.compute!r})")
    choices.append("divide the model over more ranks (parallel.tensor, parallel.pipeline)")
    return f"To need less memory: {', '.join(choices[:-1])}{' or ' * (len(choices) > 1)}{choices[-1]}"

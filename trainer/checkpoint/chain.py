"""Check the certificates of a run: each against the bytes of its checkpoint, and all as a chain. Needs no torch.

event log   step 20 ---> step 40 ---> step 60 ---> step 80        every checkpoint that was ever saved
on disk                  step 40      step 60      step 80        those that are kept
                            |            |            |
                         read again: digests of files, of tensors, of the position, and what the run is made of
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from onward.trainer.checkpoint.certificate import (
    NO_DIGEST,
    Certificate,
    digest_of_position,
    digest_of_tensors,
    origin_of,
)
from onward.trainer.checkpoint.manifest import CHUNK_BYTES, Manifest, split_key
from onward.trainer.checkpoint.retention import list_checkpoints, list_damaged
from onward.trainer.checkpoint.tensor_sums import ITEM_BYTES, KINDS, FileSums, added
from onward.trainer.checkpoint.verification import VerifiedCheckpoint, verify
from onward.trainer.errors import CheckpointError
from onward.trainer.events import CheckpointSaved
from onward.trainer.run.directory import RunDir, read_settings
from onward.trainer.run.history import RunHistory
from onward.trainer.run.kept_settings import accepted_changes
from onward.trainer.run.records import Record, RuntimeReport, read_record

COMPUTED = ("weights", "optimizer", "position")
"""What a checkpoint holds itself; the other fields of a certificate are of what it was computed from."""


class CheckedCheckpoint(Record):
    """A checkpoint that was read again."""

    name: str
    step: int = -1
    """-1 if its manifest cannot be read."""
    certificate: Certificate | None = None
    goes_on_from: str = ""
    """The checkpoint that its certificate names as the one before; "" if that is not known."""
    problems: tuple[str, ...] = ()


class CheckedRun(Record):
    """The checkpoints that are kept, and what is wrong with the chain of all that were ever saved."""

    run: str
    checkpoints: tuple[CheckedCheckpoint, ...]
    saved: int = 0
    """Checkpoints in the event log, the deleted ones included."""
    repeated: tuple[int, ...] = ()
    """Steps that were saved more than once, since an attempt made them again."""
    problems: tuple[str, ...] = ()
    """All that is wrong, those of the checkpoints included."""


def check_run(run: RunDir) -> CheckedRun:
    """Read every kept checkpoint of a run again, and check the chain of certificates in its event log.

    Raises CheckpointError when there is no checkpoint.
    """
    kept = [check_checkpoint(path, run) for path in list_checkpoints(run)]
    if not kept and not list_damaged(run):
        raise CheckpointError(f"run {run.root.name} has no checkpoint to verify")
    history = RunHistory.of(run.events, series=())
    logged = [(event, found) for event in history.checkpoints if (found := _certificate_in(event))]
    names = {found.digest: f"step-{event.step:09d}" for event, found in logged}
    names |= {each.certificate.digest: each.name for each in kept if each.certificate}
    # a crash between a rename and its event: the attempt that went on from that checkpoint has logged its digest
    names |= {event.certificate: f"step-{event.step:09d}" for event in history.starts}
    names |= {NO_DIGEST: "the start"}
    foreign = bool(run.config.exists() and read_settings(run).checkpoint.load)
    known = tuple(
        each.model_copy(update={"goes_on_from": names.get(each.certificate.previous, "")}) if each.certificate else each
        for each in kept
    )
    problems = [f"{each.name}: {problem}" for each in known for problem in each.problems]
    problems += [f"{path.name} was found damaged before, and is kept for examination" for path in list_damaged(run)]
    problems += _broken_links(logged, names, foreign=foreign)
    problems += _replaced(known, logged)
    repeated = [(one, other) for place, one in enumerate(logged) for other in logged[place + 1 :] if _same(one, other)]
    if repeats_bits(run):
        problems += [problem for (event, one), (_, other) in repeated if (problem := _differs(event.step, one, other))]
    return CheckedRun(
        run=run.root.name,
        checkpoints=known,
        saved=len({event.step for event, _ in logged}),
        repeated=tuple(sorted({event.step for (event, _), _ in repeated})),
        problems=tuple(dict.fromkeys(problems)),
    )


def repeats_bits(run: RunDir) -> bool:
    """Return whether a step of the run that is made again has the same bits: not on GPUs without `deterministic`."""
    if not run.config.exists() or read_settings(run).train.deterministic:
        return True
    return not run.runtime.exists() or all(
        rank.device == "cpu" for rank in read_record(run.runtime, RuntimeReport).ranks
    )


def check_checkpoint(path: Path, run: RunDir | None = None) -> CheckedCheckpoint:
    """Read a checkpoint again and compare its certificate with it, and with what `run` is computed from."""
    try:
        checkpoint = verify(path)
    except (CheckpointError, OSError) as error:
        return CheckedCheckpoint(name=path.name, problems=(str(error),))
    found, certificate = checkpoint.manifest, checkpoint.manifest.certificate
    if certificate is None:
        problem = "it has no certificate: an earlier version has saved it; its files have their digests"
        return CheckedCheckpoint(name=path.name, step=found.state.step, problems=(problem,))
    computed = recompute(checkpoint)
    if run is not None:
        computed |= {key: value for key, value in origin_of(run).model_dump().items() if value != NO_DIGEST}
        if accepted_changes(run):  # then checkpoints of one run have different settings, and the report says which
            del computed["config"]
    listed = certificate.model_dump()
    problems = tuple(
        f"its certificate has {key} {listed[key][:12]}, but {value[:12]} was computed"
        for key, value in computed.items()
        if listed[key] != value
    )
    return CheckedCheckpoint(name=path.name, step=found.state.step, certificate=certificate, problems=problems)


def recompute(checkpoint: VerifiedCheckpoint) -> dict[str, str]:
    """Return the digests of weights, optimizer and position, from the bytes of the files."""
    totals = dict.fromkeys(KINDS, (0, 0))
    for file in checkpoint.manifest.files:
        for kind, found in _sums_of(checkpoint.path / file.name, checkpoint.manifest).items():
            totals[kind] = added(totals[kind], found)
    tensors = checkpoint.manifest.full_tensors
    digests = {kind: digest_of_tensors(tensors, kind, totals[kind]) for kind in KINDS}
    return {**digests, "position": digest_of_position(checkpoint.manifest.state)}


def _sums_of(path: Path, manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Return the sums of the pieces in a safetensors file that was verified."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    pieces = []
    for key, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        name, box = (key, None) if manifest.format == 1 else split_key(key)
        full = tuple((0, size) for size in entry["shape"])
        pieces.append((name, entry["dtype"], full if box is None else box))
        if entry["dtype"] not in ITEM_BYTES:
            raise CheckpointError(f"{path} holds {key} as {entry['dtype']}, a type that Onward does not save")
    sums = FileSums(pieces)
    if path.stat().st_size > 8 + length:  # an empty part cannot be mapped
        content = np.memmap(path, np.uint8, "r", offset=8 + length).data
        for start in range(0, len(content), CHUNK_BYTES):
            sums.update(content[start : start + CHUNK_BYTES])
    return sums.sums


def _certificate_in(event: CheckpointSaved) -> Certificate | None:
    try:
        return Certificate.model_validate(event.certificate) if event.certificate else None
    except ValueError:
        return None


def _broken_links(
    logged: list[tuple[CheckpointSaved, Certificate]], names: dict[str, str], *, foreign: bool
) -> Iterator[str]:
    """Yield where a checkpoint goes on from one that nobody knows. foreign: the first is of another run."""
    for number, (event, found) in enumerate(logged):
        if found.previous not in names and not (foreign and not number):
            yield (
                f"step {event.step} goes on from certificate {found.previous[:12]}, which is neither in the event log "
                "nor of a checkpoint that is kept"
            )


def _replaced(kept: tuple[CheckedCheckpoint, ...], logged: list[tuple[CheckpointSaved, Certificate]]) -> Iterator[str]:
    """Yield the kept checkpoints that are not those which were saved."""
    for each in kept:
        of_step = {found.digest for event, found in logged if event.step == each.step}
        if each.certificate and of_step and each.certificate.digest not in of_step:
            yield f"{each.name} has certificate {each.certificate.digest[:12]}, and the event log another for its step"


def _same(one: tuple[CheckpointSaved, Certificate], other: tuple[CheckpointSaved, Certificate]) -> bool:
    """Return whether two checkpoints are of one step and computed from the same."""
    origins = [found.model_dump(include={"config", "data", "model"}) for _, found in (one, other)]
    return one[0].step == other[0].step and origins[0] == origins[1]


def _differs(step: int, one: Certificate, other: Certificate) -> str:
    different = [key for key in COMPUTED if getattr(one, key) != getattr(other, key)]
    if not different:
        return ""
    return f"step {step} was made twice from the same configuration, data and model, with other {', '.join(different)}"

"""Bring a run to the hosts of its hostfile that have a home of their own, by way of its store.

    head host                                                          another host (trainer/attempt/own_home.py)
    what settings name, the shards        -->  STORE/RUN_ID  -->       those that are not there yet, by digest
    checkpoints (tasks/storing)           -->                -->       the newest one
    small records                         ------- ssh ------->         config.json, attempt ...

The shards are sent once, when the first of these hosts is known; other runs need none in their store.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from onward.infra.job.hosts import ask_programs, is_here, read_hostfile
from onward.tasks.storing.named_inputs import named_inputs
from onward.trainer.attempt.own_home import LINE, RECORDS, Brought, HostInputs
from onward.trainer.checkpoint.retention import list_checkpoints, step_in
from onward.trainer.data.formats.finished_shards import MANIFEST, ORIGIN, ShardOrigin
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.errors import OnwardError, RuntimeUnavailable
from onward.trainer.quantities import shown_size
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.records import Networks, read_record, record_if_written, write_record
from onward.trainer.run.remote.stored_run import (
    SHOWN,
    Sending,
    StoredCheckpoint,
    StoredFile,
    StoredInput,
    StoredRun,
    file_key,
    record_in,
)

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "onward.trainer.attempt.own_home")
LIMIT_S = 3600.0
"""Longest time in which a host must have everything."""
MOST_CHECKPOINTS = 2
CHECKPOINT_S = 120.0
"""How long the newest checkpoint is waited for, which the checkpoint task sends; else an older one counts."""


def note_own_homes(run: RunDir, hosts: tuple[str, ...]) -> None:
    """Add hosts to those that have a home of their own."""
    known = record_if_written(run.networks, Networks) or Networks(networks=())
    if added := set(hosts) - set(known.own_homes):
        write_record(run.networks, known.model_copy(update={"own_homes": tuple(sorted({*known.own_homes, *added}))}))


def own_homes(run: RunDir) -> list[str]:
    """Return the hosts with a home of their own, of those that the next launch uses."""
    hostfile = read_config(run).launch.hostfile
    if not hostfile or not run.networks.exists():
        return []
    used = read_hostfile(Path(hostfile)).keys() & set(read_record(run.networks, Networks).own_homes)
    return [host for host in sorted(used) if not is_here(host)]


def bring_run(run: RunDir, *, with_data: bool = True, attempt: int = 0) -> None:
    """Let each host with a home of its own have what its ranks read. with_data: all, else the records alone.

    attempt: the one that will begin next. Raises RuntimeUnavailable with the problems of all hosts, and the errors of
    the store.
    """
    hosts = own_homes(run)
    if not hosts:
        return
    sending = read_record(record_in(run), Sending)
    texts = {name: (run.root / name).read_text() for name in RECORDS if (run.root / name).exists()}
    texts["attempt"] = str(attempt)
    wanted = _question(run, sending).model_copy(update={"records": texts})
    if with_data:
        wanted = _with_data(run, sending, wanted)
    problems = []
    for host, answer in _asked(hosts, run, wanted).items():
        problems += [f"{host} {problem}" for problem in answer.problems]
        if answer.bytes:
            log.info("%s got %s of the run in %.1f s", host, shown_size(answer.bytes), answer.took_s)
    if problems:
        raise RuntimeUnavailable(problems)


def leave_hosts(run: RunDir) -> None:
    """Delete what hosts with a home of their own have of a run that is done; what does not answer keeps it."""
    # whatever is wrong with a host, or with the hostfile by now: the run is trained
    try:
        if not (hosts := own_homes(run)):
            return
        left = _question(run, read_record(record_in(run), Sending)).model_copy(update={"leave": True})
        answers = _asked(hosts, run, left)
    except (OnwardError, OSError, ValueError) as error:
        log.warning("hosts with a home of their own keep their copy of the run: %s", error)
        return
    for host, answer in answers.items():
        for problem in answer.problems:
            log.warning("%s %s", host, problem)


def _question(run: RunDir, sending: Sending) -> HostInputs:
    nonce = secrets.token_hex(8)
    return HostInputs(run=run.root, nonce=nonce, name=f".hosts-{nonce}", store=sending.url)


def _asked(hosts: list[str], run: RunDir, wanted: HostInputs) -> dict[str, Brought]:
    # a host that has got its file system back meanwhile sees it, and needs nothing
    written = run.root / wanted.name
    written.write_text(wanted.nonce)
    try:
        answers = ask_programs(hosts, PROGRAM, wanted.model_dump_json(), LINE, limit_s=LIMIT_S)
    finally:
        written.unlink()
    found = {}
    for host, answer in answers.items():
        silent = Brought(problems=(f"does not get the run: {answer.problem}",))
        found[host] = silent if answer.problem else Brought.model_validate_json(answer.report)
    return found


def _with_data(run: RunDir, sending: Sending, wanted: HostInputs) -> HostInputs:
    """Return what all hosts get, after sending to the store what is not there."""
    stored = StoredRun(sending.url)
    manifest = read_record(run.shards / MANIFEST, ShardManifest)
    origin = record_if_written(run.shards / ORIGIN, ShardOrigin)
    quantized = sorted(filter(Path.is_file, run.quantized.rglob("*")))
    return wanted.model_copy(
        update={
            "inputs": tuple(_inputs(run, stored, sending)),
            "files": {path.relative_to(run.root).as_posix(): _sent(stored, sending, path) for path in quantized},
            "manifest": (run.shards / MANIFEST).read_text(),
            "shards": origin.url if origin else _sent_shards(run, stored, manifest),
            "checkpoints": _newest(run, stored, sending),
        }
    )


def _inputs(run: RunDir, stored: StoredRun, sending: Sending) -> Iterator[StoredInput]:
    """Yield what settings name, after sending what is not in the store."""
    state = stored.state(sending.number)
    known = {each.setting: each for each in state.inputs} if state else {}
    for each in named_inputs(run):
        if each.setting in known:
            yield known[each.setting]
        else:
            sent = {name: _sent(stored, sending, path) for name, path in each.files.items()}
            yield StoredInput(setting=each.setting, location=each.location, name=each.name, files=sent)


def _sent(stored: StoredRun, sending: Sending, path: Path) -> StoredFile:
    digest = sha256(path)
    key = file_key(sending.number, digest, path.name)
    if not stored.files.is_same(key, path, digest):
        stored.files.put(key, path)
    return StoredFile(key=key, sha256=digest, bytes=path.stat().st_size)


def _sent_shards(run: RunDir, stored: StoredRun, manifest: ShardManifest) -> str:
    """Return where the files of the shards are in the store, after sending those that are not there."""
    # by content: another machine may have made other bytes of the same data
    place = f"shards/{manifest.key}-{manifest.digest[:SHOWN]}"
    # the manifest is sent last: behind it all files are there
    if not stored.files.has(f"{place}/{MANIFEST}"):
        size = shown_size(sum(file.bytes for file in manifest.all_files))
        log.info("the shards (%s) are sent to %s, for hosts with a home of their own", size, stored.files.shown)
        there = stored.files.names(f"{place}/")
        for file in manifest.all_files:
            if there.get(f"{place}/{file.name}") != file.bytes:
                stored.files.put(f"{place}/{file.name}", run.shards / file.name)
        stored.files.put(f"{place}/{MANIFEST}", run.shards / MANIFEST)
    return f"{stored.location}/{place}"


def _newest(run: RunDir, stored: StoredRun, sending: Sending) -> tuple[StoredCheckpoint, ...]:
    """Return the newest checkpoints that the store and this disk have, after waiting for the newest of this disk.

    Two, so that a damaged one may be passed over on all ranks.
    """
    step = max((step_in(path.name) for path in list_checkpoints(run)), default=0)
    deadline = time.monotonic() + CHECKPOINT_S
    while True:
        state = stored.state(sending.number)
        both = []
        for each in state.checkpoints if state else ():
            manifest = run.checkpoint(each.step) / "manifest.json"
            if manifest.is_file() and sha256(manifest) == each.digest:
                both.append(each)
        newest = both[-1].step if both else 0
        if newest >= step:
            return tuple(both[-MOST_CHECKPOINTS:])
        if time.monotonic() > deadline:
            what = f"that of step {newest} is used" if newest else "the run begins again"
            log.warning("the checkpoint of step %d is not in the store after %g s, and %s", step, CHECKPOINT_S, what)
            return tuple(both[-MOST_CHECKPOINTS:])
        time.sleep(1.0)

"""Files that Onward itself has written, damaged: records of runs and sweeps, checkpoints, shards, bundles."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile.cases import SPARSE, damaged
from tests.hostile.run_template import RUN, SWEEP, copy_into
from tests.hostile.sandbox import Case

DEEP: Any = json.loads("[" * 900 + "]" * 900)
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 2**31, 2**53 + 1, 2**63, -(2**63), 10**400, float("inf"), float("nan"), 1e308),
    *("", "x", "\0", "a\0b", "\ud800", "\u202e", "\x1b[2J", "x" * 100_000, "9" * 5000, "../../secret/secret.csv"),
    *("/dev/zero", "~nobody-here", "/", "step-000000004", [], {}, [[]], {"a": {"b": 1}}, ["x"] * 1000, DEEP),
)
TEXTS = (b"", b"\0", b"null", b"[]", b"{}", b"1", b'"x"', b"[" * 100_000, b'{"a":' * 3000, b"\xff\xfe{}", b"9" * 5000)
COMMANDS = (
    *(("status", "last"), ("status", RUN, "--json"), ("runs",), ("runs", "--json"), ("verify", "last")),
    *(("verify", f"home/runs/{RUN}/checkpoints/step-000000004"), ("verify", "last", "--json"), ("resume", "last")),
    *(
        ("resume", RUN[:8], "stop.max_hours=1"),
        ("resume", "last", "--from-start"),
        ("gc",),
        ("gc", "--json"),
        ("clean",),
    ),
    *(("export", "last", "-o", "new.onnx"), ("export", f"home/runs/{RUN}", "-o", "new.onnx"), ("sweep", "--list")),
    *(("bundle", "last", "new.bundle"), ("bundle", "last", "run.bundle"), ("sweep", "--resume", SWEEP[:8]), ("ui",)),
    *(("export", f"home/runs/{RUN}/checkpoints/step-000000002", "-o", "new.onnx"), ("down",), ("status", "test")),
    *(("report",), ("report", RUN, "--json"), ("report", "last", "-o", "new.html")),
)


def records(rng: random.Random, folder: Path) -> Case:
    """One file of the home, or two, that is damaged, replaced, or holds other things; tried by all that read it."""
    home = copy_into(folder)
    files = sorted(path for path in home.rglob("*") if not path.is_symlink())
    small = [path for path in files if path.suffix == ".json"]
    for _ in range(rng.choice((1, 1, 1, 2))):
        path = rng.choice(small if rng.random() < 0.6 else files)
        # what was put in the place of the first one may be a FIFO, or without an end
        if path.is_symlink() or not (path.is_dir() or (path.is_file() and path.stat().st_size < SPARSE)):
            continue
        if path.is_dir() or rng.random() < 0.35:
            _replaced(rng, path)
        elif path.suffix == ".json" and rng.random() < 0.7:
            _other_values(rng, path)
        else:
            path.write_bytes(rng.choice(TEXTS) if rng.random() < 0.3 else damaged(rng, path.read_bytes()))
    return Case(rng.choice(COMMANDS))


def _replaced(rng: random.Random, path: Path) -> None:
    """Put something else in the place of a file or a directory."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    kind = rng.randrange(9)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        os.mknod(path, 0o140644)
    elif kind == 2:
        path.mkdir()
    elif kind in (3, 4):
        targets = ("/dev/zero", "/dev/full", path.name, "/nowhere", "../secret/secret.csv", "/")
        path.symlink_to(rng.choice(targets))
    elif kind == 5:
        with path.open("wb") as file:
            file.truncate(rng.choice((SPARSE, 1 << 20)))
    elif kind == 6:
        path.write_bytes(b"[" + b"0," * rng.choice((1000, 1 << 22)))
    elif kind == 7:
        path.write_bytes(rng.choice(TEXTS))


def _other_values(rng: random.Random, path: Path) -> None:
    """Change values of a JSON file; of a manifest of a checkpoint also its digest of itself."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # it was replaced before
        return
    for _ in range(rng.choice((1, 1, 3))):
        places = list(_places(found))
        if not places:
            break
        holder, key = rng.choice(places)
        if rng.random() < 0.15 and isinstance(holder, dict):
            holder[rng.choice(("unknown", "", "\0", "../x"))] = holder.pop(key)
        elif rng.random() < 0.15:
            del holder[key]
        else:
            holder[key] = rng.choice(ODD)
    text = json.dumps(found, indent=1)
    if isinstance(found, dict) and isinstance(own := found.get("sha256"), str) and len(own) == 64:
        zeros = text.replace(own, "0" * 64, 1)
        text = text.replace(own, hashlib.sha256(zeros.encode()).hexdigest(), 1)
    path.write_text(text)


def _places(found: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each dictionary or list inside a value, with each of its keys."""
    for key in list(found) if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ():
        yield found, key
        yield from _places(found[key])


def bundles(rng: random.Random, folder: Path) -> Case:
    """Bundles: bytes that are damaged, members of other names, sizes and contents."""
    copy_into(folder)
    path = folder / "run.bundle"
    if rng.random() < 0.4:
        path.write_bytes(damaged(rng, path.read_bytes()))
        return Case(("export", "run.bundle", "-o", "new.onnx"))
    with zipfile.ZipFile(path) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    listing = json.loads(members["bundle.json"])
    name = rng.choice(sorted(members))
    kind = rng.randrange(5)
    if kind == 0:
        members[rng.choice(("../x", "/x", "run/../../x", "a\\b", "run/" + "x" * 300, "run/é", "run//x"))] = b"x"
    elif kind == 1:
        del members[name]
    elif kind == 2 and name.endswith(".json"):
        place = folder / "member.json"
        place.write_bytes(members[name])
        _other_values(rng, place)
        members[name] = place.read_bytes()
    else:
        members[name] = rng.choice(TEXTS) if rng.random() < 0.3 else damaged(rng, members[name])
    if rng.random() < 0.7 and isinstance(listing.get("files"), dict):  # with the right digests
        listing["files"] = {
            key: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for key, content in members.items()
            if key != "bundle.json"
        }
        if name != "bundle.json":
            members["bundle.json"] = json.dumps(listing).encode()
    packing = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w", packing) as archive:
        for key, content in members.items():
            entry = zipfile.ZipInfo(key)
            entry.external_attr = rng.choice((0o600, 0o600, 0o120777)) << 16
            entry.compress_type = packing
            archive.writestr(entry, content)
    return Case(("export", "run.bundle", "-o", "new.onnx", *rng.sample(("--run-code",), 1)[: rng.random() < 0.2]))

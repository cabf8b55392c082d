"""What is examined: every architecture of the zoo by every exporter of torch, and the committed files of others."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from onward.trainer.onnx_graph.files.stored_protos import stored_protos
from tests.support import zoo
from tests.support.foreign_files import FILES, Array, ForeignFile
from tests.support.ranks import ROOT

SOURCES = ("trainer/onnx_graph", "trainer/onnx_import", "trainer/export", "tests/compatibility", "tests/support")
"""Folders of Python files on which the results depend."""
OURS = ("torch", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Entry:
    """One file of the table."""

    name: str
    architecture: str
    exporter: str
    variant: str
    """How the exporter was called: "plain" for training, "folded" by default; empty for files of other exporters."""
    versions: Mapping[str, str]
    """Of the exporter and what it exports from."""
    path: Callable[[], Path]
    """Return the file; it is exported if it does not exist."""
    feed: Callable[[int, int], dict[str, Array]]
    """(batch size, seed) -> inputs by name."""
    truth: Callable[[onnx.ModelProto], dict[str, bool]]
    """Stored tensor -> whether the framework trains it, for the tensors of which that is known."""

    @property
    def sources(self) -> str:
        """Return a digest of the code and the file that the result depends on."""
        digest = hashlib.sha256(_code().encode())
        if not self.variant:
            digest.update(self.path().read_bytes())
        return digest.hexdigest()[:16]


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest() + repr(sorted(versions(OURS).items()))


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed versions, without the local part of a build such as +cpu."""
    return {name: importlib.metadata.version(name).partition("+")[0] for name in packages}


def all_entries() -> dict[str, Entry]:
    """Return every entry by its name, such as zoo/bert/dynamo-20/folded or foreign/keras-cnn."""
    found = [
        _zoo_entry(name, exporter, folded=folded)
        for name, architecture in zoo.ARCHITECTURES.items()
        for exporter in architecture.exporters
        for folded in (False, True)
    ]
    found += [_foreign_entry(name, file) for name, file in FILES.items()]
    return {entry.name: entry for entry in found}


def _zoo_entry(name: str, exporter: str, *, folded: bool) -> Entry:
    variant = "folded" if folded else "plain"
    return Entry(
        f"zoo/{name}/{exporter}/{variant}",
        name,
        exporter,
        variant,
        {key: versions(OURS)[key] for key in ("torch", "onnxscript")},
        lambda: zoo.exported_file(name, exporter, folded=folded),
        lambda batch, seed: {key: value.numpy() for key, value in zoo.feed(name, batch, seed).items()},
        lambda model: _zoo_truth(name, model),
    )


def _foreign_entry(name: str, file: ForeignFile) -> Entry:
    return Entry(
        f"foreign/{name}",
        file.architecture,
        file.exporter,
        "",
        file.versions,
        lambda: file.path,
        file.feed,
        lambda model: {
            key: key in file.trained
            for key, tensor in stored_protos(model.graph)
            if key in file.trained | file.buffers or tensor.data_type in (onnx.TensorProto.FLOAT,)
        },
    )


def _zoo_truth(name: str, model: onnx.ModelProto) -> dict[str, bool]:
    """Return what is known from the module: a stored tensor has the name or the values of a parameter or a buffer.

    A folded file has tensors that are computed from several, of which nothing is known here. Values are compared in
    sorted order, since exporters transpose; single numbers are too often equal by chance.
    """
    module = zoo.build(name)
    held = {"parameter": dict(module.named_parameters(remove_duplicate=False)), "buffer": dict(module.named_buffers())}
    by_name = {key: kind == "parameter" for kind, tensors in held.items() for key in tensors}
    by_values: dict[bytes, set[bool]] = {}
    for kind, tensors in held.items():
        for tensor in tensors.values():
            if tensor.is_floating_point():
                by_values.setdefault(_sorted(tensor.detach().numpy()), set()).add(kind == "parameter")
    found = {}
    for key, stored in stored_protos(model.graph):
        array = numpy_helper.to_array(stored)
        if array.dtype != np.float32:
            continue
        kinds = by_values.get(_sorted(array), set()) if array.size > 1 else set()
        if key in by_name:
            found[key] = by_name[key]
        elif len(kinds) == 1:
            found[key] = next(iter(kinds))
    return found


def _sorted(array: Array) -> bytes:
    return np.sort(array, axis=None).tobytes()


def as_tensors(inputs: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Return the inputs as torch tensors."""
    return {name: torch.from_numpy(array) for name, array in inputs.items()}

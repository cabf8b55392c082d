"""The functions behind `onward export` and `onward bundle`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onward.flows.api import require_flow
from onward.flows.configuration import AnyPath, prefect_at_home

if TYPE_CHECKING:
    from onward.trainer.checkpoint.bundle import Bundle
    from onward.trainer.run.directory import RunDir
    from onward.trainer.run.records import ExportedModel


def export(
    source: AnyPath,
    output: AnyPath,
    *,
    variants: Sequence[str] = (),
    overwrite: bool = False,
    run_code: bool = False,
) -> ExportedModel:
    """Write a checkpoint's weights into its ONNX file at `output`, and verify the result under onnxruntime.

    `source`: a checkpoint directory, a bundle, or a run as `status` takes it. `variants`: further files to write, of
    "optimized", "fp16", "bf16", "fp16_compute", "int8_dynamic", "int8_static", "without_loss", "with_preprocessing",
    "training" (the graphs that train the model without torch). `overwrite`: also replace files at `output` that no
    export has written, or that were changed since. `run_code`: accept a bundle with Python code. Raises ExportRefused
    with every failed check; no file is written then.
    """
    require_flow("onward.export")
    with prefect_at_home():
        from onward.tasks.export import export_file
    from onward.trainer.config.sections.results import ExportConfig

    # validated like settings, so that a wrong variant is refused with the same sentence
    extras = ExportConfig.model_validate({"variants": tuple(variants), "overwrite": overwrite})
    with opened(os.fspath(source), run_code=run_code) as (found, checkpoint):
        return export_file(found, checkpoint, Path(output), extras=extras)


def bundle(source: AnyPath, file: AnyPath, /) -> Bundle:
    """Write a checkpoint with everything that its export needs into one file; return the list of what is in it.

    `source`: a checkpoint directory, or a run as `status` takes it. `onward.export` takes the file on any machine. It
    holds the ONNX file, the code of losses and converters, the evaluation rows and the configuration, without
    addresses of servers. Raises ConfigError when something is missing or `file` is another file, CheckpointError for a
    damaged checkpoint.
    """
    from onward.flows.run_state.runs import find_checkpoint
    from onward.trainer.checkpoint.bundle import write_bundle
    from onward.trainer.checkpoint.verification import verify

    run, checkpoint = find_checkpoint(os.fspath(source))
    return write_bundle(run, verify(checkpoint), Path(file).absolute())


@contextlib.contextmanager
def opened(text: str, *, run_code: bool = False) -> Iterator[tuple[RunDir, Path]]:
    """Yield the run and the checkpoint that `text` names: a file is a bundle, which is opened in a temporary directory.

    run_code: whether the bundle may have Python code. Raises as `find_checkpoint` and `bundle.unpack`.
    """
    from onward.flows.run_state.runs import find_checkpoint
    from onward.infra.job.temporary_folders import owned_folder
    from onward.trainer.checkpoint.bundle import unpack

    # names of runs and checkpoints are directories, and a bundle is one file
    if not Path(text).is_file():
        yield find_checkpoint(text)
        return
    with owned_folder("onward-bundle-") as folder:
        yield unpack(Path(text), folder.resolve(), run_code=run_code)

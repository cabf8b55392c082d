"""Open an ONNX model in onnxruntime, on the CPU or, where it is asked for, on a GPU."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Literal

import onnx
import onnxruntime

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.attribute_bounds import passed_attribute_problems
from onward.trainer.onnx_graph.files.integer_division import guard_integer_divisions
from onward.trainer.onnx_graph.files.model_files import read_model, refuse_problems
from onward.trainer.onnx_graph.files.whole_models import LARGE_BYTES, data_file_of, fits_one_file, write_whole

Device = Literal["cpu", "cuda"]
PROVIDERS: dict[Device, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# TF32 has 10 bits of mantissa: with it fp32 products would differ from those of the CPU by 1e-3
OPTIONS: dict[Device, dict[str, str]] = {"cpu": {}, "cuda": {"use_tf32": "0"}}
DATA_FOLDER = "session.model_external_initializers_file_folder_path"
SAVED_DATA = "session.optimized_model_external_initializers_file_name"
SAVED_DATA_FROM = "session.optimized_model_external_initializers_min_size_in_bytes"


def open_session(
    model: Path | onnx.ModelProto,
    *,
    optimise: bool = True,
    save: Path | None = None,
    save_data: bool = False,
    device: Device = "cpu",
    base: Path | None = None,
    share_constants: bool = True,
    threads: int = 0,
    standard: bool = False,
    parsed: onnx.ModelProto | None = None,
) -> onnxruntime.InferenceSession:
    """Open a session of onnxruntime. Its errors, which have no common base class, are raised only.

    base: the directory of the external data of a model that is not opened from its file. save: also write the graph
    that the session runs there, optimised for any machine; save_data: with its weights in a data file
    (whole_models.py); standard: with operators of ONNX's own alone. threads: how many compute, 1 = the calling one; 0 =
    as many as there are. share_constants: let it keep one of several equal constants. False for BatchNormalization in
    training form: onnxruntime 1.31 writes the new mean over the stored one, which may then be the bias as well, before
    it adds the bias. parsed: what a model given by its path holds, None = it is read here. Raises RuntimeError if
    onnxruntime cannot use the device.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is raised is not printed as well
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    if save:  # levels above EXTENDED use memory layouts of this machine's processor
        options.graph_optimization_level = levels.ORT_ENABLE_BASIC if standard else levels.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(save)
        if save_data:
            options.add_session_config_entry(SAVED_DATA, data_file_of(save).name)
            options.add_session_config_entry(SAVED_DATA_FROM, str(LARGE_BYTES))
    options.intra_op_num_threads = threads
    # a file is opened by its name, unless its graph has to be changed
    with contextlib.ExitStack() as opened:
        if isinstance(model, Path):
            content: str | bytes = guarded_content(model, parsed) or str(model)
            base = base or model.parent
        elif fits_one_file(guarded := guard_integer_divisions(model)):
            content = guarded.SerializeToString()
        else:
            # the files may go when the session has them mapped or copied
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="onward-large-")))
            write_whole(guarded, folder / "model.onnx")
            content = str(folder / "model.onnx")
        if base and isinstance(content, bytes):
            options.add_session_config_entry(DATA_FOLDER, str(base))
        session = onnxruntime.InferenceSession(
            content,
            options,
            providers=[(PROVIDERS[device], OPTIONS[device])],
            disabled_optimizers=[] if share_constants else ["ConstantSharing"],
        )
    # where a library of CUDA is missing, onnxruntime prints that and goes on with the CPU
    if (found := session.get_providers()[0]) != PROVIDERS[device]:
        raise RuntimeError(f"onnxruntime has {PROVIDERS[device]} but cannot use it; it chose {found}")
    return session


def guarded_content(path: Path, parsed: onnx.ModelProto | None = None) -> bytes | None:
    """Return what to open in place of a file in which a division may end the process; None = the file itself.

    parsed: what the file holds, None = it is read here. Its external data, if it has some, lies beside the file still.
    Raises as `read_model`, and UnsupportedModel for attributes that end the process as well.
    """
    if parsed is not None:
        refuse_problems(path, parsed)
    model = read_model(path) if parsed is None else parsed
    try:
        problems = list(passed_attribute_problems(model))
    except Exception as error:  # those of onnx's inliner have no common base class
        raise UnsupportedModel(f"{path}: its functions cannot be read: {error}") from error
    if problems:
        raise UnsupportedModel(f"{path}: {problem}" for problem in problems)
    guarded = guard_integer_divisions(model)
    if guarded is model:
        return None
    # what runs is the file, also where its graph was changed since (rehearsal/parity.py)
    return guarded.SerializeToString() if parsed is None else guarded_content(path)

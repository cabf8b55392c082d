"""All families by name."""

from __future__ import annotations

from tests.hostile import config_files, onnx_files
from tests.hostile.sandbox import Family

FAMILIES: dict[str, Family] = {
    "onnx": onnx_files.file,
    "damaged onnx": onnx_files.damaged_file,
    "setting": config_files.setting,
    "configuration": config_files.file,
    "arguments": config_files.arguments,
}

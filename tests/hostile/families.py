"""All families by name."""

from __future__ import annotations

from tests.hostile import array_files, config_files, data_files, media_files, onnx_files, record_files
from tests.hostile.sandbox import Family

FAMILIES: dict[str, Family] = {
    "onnx": onnx_files.file,
    "damaged onnx": onnx_files.damaged_file,
    "setting": config_files.setting,
    "configuration": config_files.file,
    "arguments": config_files.arguments,
    "csv": data_files.csv,
    "json lines": data_files.json_lines,
    "text": data_files.text,
    "npz": array_files.npz,
    "arrow": array_files.arrow,
    "shards": array_files.shards,
    "images": media_files.images,
    "audio": media_files.audio,
    "places": data_files.places,
    "records": record_files.records,
    "bundles": record_files.bundles,
}

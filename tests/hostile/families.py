"""All families by name."""

from __future__ import annotations

from tests.hostile import (
    array_files,
    config_files,
    data_files,
    media_files,
    onnx_files,
    operator_files,
    record_files,
    word_files,
)
from tests.hostile.sandbox import Family

FAMILIES: dict[str, Family] = {
    "onnx": onnx_files.file,
    "damaged onnx": onnx_files.damaged_file,
    "divisions": operator_files.divisions,
    "attributes": operator_files.attributes,
    "setting": config_files.setting,
    "configuration": config_files.file,
    "arguments": config_files.arguments,
    "overrides": word_files.overrides,
    "unknown keys": word_files.unknown_keys,
    "options": word_files.options,
    "terminal names": word_files.terminal_names,
    "csv": data_files.csv,
    "json lines": data_files.json_lines,
    "text": data_files.text,
    "npz": array_files.npz,
    "arrow": array_files.arrow,
    "shards": array_files.shards,
    "images": media_files.images,
    "audio": media_files.audio,
    "wrong suffixes": media_files.wrong_suffixes,
    "cells": media_files.cells,
    "places": data_files.places,
    "records": record_files.records,
    "bundles": record_files.bundles,
}

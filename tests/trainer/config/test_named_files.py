"""What settings name: a file, a function in it, and whether it is code; what is not known to be data is code."""

from __future__ import annotations

import pytest

from onward.trainer.config.named_files import DATA, NamedFile, named_file, named_files
from onward.trainer.config.setting_paths import PATHS


@pytest.mark.parametrize(
    ("value", "location", "function", "is_code"),
    [
        ("/a/loss.py:smooth", "/a/loss.py", "smooth", True),
        ("/a/loss.onnx", "/a/loss.onnx", "", False),
        ("/a/loss.py", "/a/loss.py", "", True),
        ("/a/x.py:f.onnx", "/a/x.py", "f.onnx", True),
        ("/a/x.py:.onnx", "/a/x.py", ".onnx", True),
        ("/a/x.onnx:f", "/a/x.onnx", "f", True),
        ("/a/x.py:f:g.onnx", "/a/x.py", "f:g.onnx", True),
        ("/a/x.ONNX", "/a/x.ONNX", "", True),
        ("/a:b/loss.onnx", "/a:b/loss.onnx", "", False),
        ("/a:b/loss.py:f", "/a:b/loss.py", "f", True),
        ("s3://bucket/loss.onnx", "s3://bucket/loss.onnx", "", False),
        ("s3://bucket/loss.py:f", "s3://bucket/loss.py", "f", True),
        ("loss", "loss", "", True),
    ],
)
def test_a_loss_is_data_only_as_the_whole_name_of_an_onnx_file(
    value: str, location: str, function: str, is_code: bool
) -> None:
    found = named_file("loss.file", value)
    assert found == NamedFile(location, function, is_code)
    assert found.at(location) == value


def test_each_file_of_a_setting_that_nobody_has_called_data_is_code() -> None:
    assert set(PATHS) - DATA == {"model.converters", "loss.file"}
    for name in ("model.onnx", "a.csv", "x.py"):
        assert named_file("model.converters", name).is_code
        assert named_file("a.setting.of.tomorrow", name).is_code
        assert not named_file("model.path", name).is_code


def test_all_that_settings_name_is_found_in_lists_too() -> None:
    settings = {
        "model": {"path": "/m.onnx", "converters": ["/a.py", "/b.onnx"]},
        "data": {"source": "digits", "sources": [{"source": "/d.csv"}], "test_source": ""},
        "loss": [{"file": "/x.py:f.onnx"}, {"name": "mse"}, {"file": "/y.onnx"}],
    }
    found = [(setting, file.location, file.is_code) for setting, file in named_files(settings)]
    assert found == [
        ("model.path", "/m.onnx", False),
        ("model.converters", "/a.py", True),
        ("model.converters", "/b.onnx", True),
        ("data.sources.source", "/d.csv", False),
        ("loss.file", "/x.py", True),
        ("loss.file", "/y.onnx", False),
    ]

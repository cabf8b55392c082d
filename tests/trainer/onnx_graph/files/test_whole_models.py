"""A model of any size is written: as one file, or as a small file and a data file, with the same values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.onnx_graph.files.external_ranges import ALIGNMENT_BYTES
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.files.whole_models import (
    LARGE_BYTES,
    copies_under,
    data_file_of,
    fits_one_file,
    whole_file,
    write_whole,
)
from tests.support import graphs


def with_a_weight_in_a_node() -> onnx.ModelProto:
    """Return a network that has a large weight in a Constant node, too, metadata, and a tensor in a typed field."""
    model = graphs.tiny_transformer(vocab_size=64, width=32)
    large = numpy_helper.from_array(np.arange(1000, dtype=np.float32), "held")
    typed = helper.make_tensor("typed", TensorProto.FLOAT, [400], [0.5] * 400)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["held"], value=large))
    model.graph.initializer.append(typed)
    model.graph.output.append(helper.make_tensor_value_info("held", TensorProto.FLOAT, [1000]))
    model.metadata_props.add(key="author", value="someone")
    return model


def test_a_model_that_fits_is_one_file_with_the_bytes_of_protobuf(tmp_path: Path) -> None:
    model = with_a_weight_in_a_node()
    assert write_whole(model, tmp_path / "m.onnx") is None
    assert (tmp_path / "m.onnx").read_bytes() == model.SerializeToString()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_model_that_does_not_fit_is_split_and_is_the_same_model_when_it_is_loaded(tmp_path: Path) -> None:
    model = with_a_weight_in_a_node()
    before = model.SerializeToString(deterministic=True)
    path = tmp_path / "m.onnx"
    assert write_whole(model, path, most=1000) == tmp_path / "m.onnx.data"
    assert model.SerializeToString(deterministic=True) == before, "the model given is not changed"
    assert path.stat().st_size < data_file_of(path).stat().st_size
    onnx.checker.check_model(str(path), full_check=True)
    light = onnx.load(path, load_external_data=False)
    moved = [tensor for tensor in light.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    assert moved
    for tensor in moved:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert int(entries["offset"]) % ALIGNMENT_BYTES == 0
        assert int(entries["length"]) >= LARGE_BYTES
    assert next(node for node in light.graph.node if node.op_type == "Constant").attribute[0].t.external_data
    loaded = onnx.load(path)
    for tensor in loaded.graph.initializer:
        tensor.ClearField("data_location")
    (held,) = (node.attribute[0].t for node in loaded.graph.node if node.output[0] == "held")
    held.ClearField("data_location")
    assert loaded.SerializeToString(deterministic=True) == before


def test_a_split_model_may_be_copied_under_another_name(tmp_path: Path) -> None:
    model = graphs.tiny_conv_net()
    data = write_whole(model, tmp_path / "a.onnx", most=1000)
    for folder in ("renamed", "to"):
        (tmp_path / folder).mkdir()
    place = tmp_path / "to" / "b.onnx"
    for file, target in copies_under(place, tmp_path / "a.onnx", data, folder=tmp_path / "renamed").items():
        target.write_bytes(file.read_bytes())
    assert {file.name for file in place.parent.iterdir()} == {"b.onnx", "b.onnx.data"}
    loaded = onnx.load(place)
    for ours, theirs in zip(loaded.graph.initializer, model.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(ours), numpy_helper.to_array(theirs))


def test_an_error_leaves_the_former_files_as_they_were(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    with whole_file(target) as made:
        write_whole(graphs.tiny_conv_net(), made, most=1000)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"m.onnx", "m.onnx.data"}

    def fail() -> None:
        with whole_file(target) as made:
            write_whole(graphs.tiny_transformer(), made, most=1000)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_data_file_goes_with_the_model_that_named_it_and_no_other_one_does(tmp_path: Path) -> None:
    target, model = tmp_path / "m.onnx", graphs.tiny_conv_net()

    def write(most: int) -> set[str]:
        with whole_file(target) as made:
            write_whole(model, made, most=most)
        return {file.name for file in tmp_path.iterdir()}

    assert write(1000) == {"m.onnx", "m.onnx.data"}
    assert write(10**9) == {"m.onnx"}
    # of a model that was renamed: neither the first new file nor the one that replaces it has anything to do with it
    write(1000)
    target.rename(tmp_path / "kept.onnx")
    for _ in range(2):
        assert write(10**9) == {"kept.onnx", "m.onnx", "m.onnx.data"}
    onnx.checker.check_model(str(tmp_path / "kept.onnx"))


def test_a_session_opens_a_model_that_does_not_fit_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphs.tiny_conv_net(num_classes=4, channels=1)
    feed = {model.graph.input[0].name: np.ones((2, 1, 8, 8), np.float32)}
    expected = open_session(model).run(None, feed)
    monkeypatch.setattr(
        "onward.trainer.onnx_graph.files.onnxruntime_session.fits_one_file", lambda model: fits_one_file(model, 1000)
    )
    monkeypatch.setattr(
        "onward.trainer.onnx_graph.files.onnxruntime_session.write_whole",
        lambda model, path: write_whole(model, path, most=1000),
    )
    for ours, theirs in zip(open_session(model).run(None, feed), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_reference_model_of_more_than_2_gib_is_written_opened_and_kept_within_twice_its_memory(
    tmp_path: Path,
) -> None:
    # 0.63 billion numbers, 2.5 GB
    sizes = ("--num-layers", "12", "--width", "2048", "--num-heads", "16", "--vocab-size", "1000")
    command = [sys.executable, "-m", "onward.flows.cli", "reference", "gpt2", *sizes, "-o", "m.onnx", "--json"]
    program = (
        "import json, resource, subprocess, sys;"
        "made = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, check=True);"
        "facts = json.loads(made.stdout);"
        "print(json.dumps({**facts, 'peak': resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert facts["data_bytes"] > 2**31
    assert facts["bytes"] < 2**20
    assert facts["peak"] < 1.5 * facts["data_bytes"]
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input_ids": np.arange(5, dtype=np.int64)[None]})[0]
    assert logits.shape == (1, 5, 1000)
    assert np.isfinite(logits).all()

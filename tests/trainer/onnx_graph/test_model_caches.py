"""Links are followed inside a cache of Hugging Face, and nowhere else."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

import onward
from onward.trainer.errors import UnsupportedModel
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_import.driver import load_model
from onward.trainer.onnx_import.imported_graph import named_weights
from tests.support.graphs import tiny_mlp


def external(folder: Path) -> Path:
    """A model as m.onnx, its tensors in m.bin beside it."""
    path = folder / "m.onnx"
    onnx.save(tiny_mlp(), path, save_as_external_data=True, location="m.bin", size_threshold=0)
    return path


def cached(folder: Path) -> Path:
    """A model with external data as huggingface_hub lays it down; return the link of the snapshot."""
    cache = folder / "hub" / "models--me--net"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "4f2a" / "onnx"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    path = external(folder)
    (blobs / "b1").write_bytes(path.read_bytes())
    (blobs / "b2").write_bytes(path.with_suffix(".bin").read_bytes())
    for name, blob in (("m.onnx", "b1"), ("m.bin", "b2")):
        (snapshot / name).symlink_to(Path("../../../blobs") / blob)
    return snapshot / "m.onnx"


def test_the_links_of_a_model_cache_are_followed_and_the_cache_stays_as_it_is(tmp_path):
    path = cached(tmp_path)
    before = {file.name: file.read_bytes() for file in (tmp_path / "hub" / "models--me--net" / "blobs").iterdir()}
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(str(path), options)
    feeds = {session.get_inputs()[0].name: x}
    # the folder of the cache may be a link of the user, such as ~/.cache on another disk
    (tmp_path / "elsewhere").symlink_to(tmp_path / "hub")
    other = tmp_path / "elsewhere" / path.relative_to(tmp_path / "hub")
    for given in (path, other):
        module = onward.to_module(given)
        found = module(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(found, session.run(None, feeds)[0], rtol=1e-5, atol=1e-6)
    module(torch.from_numpy(x)).square().sum().backward()
    assert all(weight.grad is not None for weight in named_weights(module).values())
    with torch.no_grad():
        named_weights(module)["fc1.weight"].add_(0.5)
    target, side = onward.write(module, path, tmp_path / "out" / "m.onnx")
    assert not target.is_symlink()
    assert not side.is_symlink()
    after = onnxruntime.InferenceSession(str(target)).run(None, feeds)[0]
    np.testing.assert_allclose(after, module(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert onward.doctor(path).importable
    full = ModelFile.read(path).with_external_data()
    names = [tensor.name for tensor in full.graph.initializer]
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in tiny_mlp().graph.initializer}
    for name, tensor in zip(names, full.graph.initializer, strict=True):
        assert np.array_equal(numpy_helper.to_array(tensor), stored[name])
    assert before == {
        file.name: file.read_bytes() for file in (tmp_path / "hub" / "models--me--net" / "blobs").iterdir()
    }


def _to_a_file_outside(cache: Path, link: Path) -> None:
    (cache.parent / "secret").write_bytes((cache / "blobs" / "b2").read_bytes())
    link.unlink()
    link.symlink_to(cache.parent / "secret")


def _to_another_snapshot(cache: Path, link: Path) -> None:
    (cache / "snapshots" / "plain").write_bytes((cache / "blobs" / "b2").read_bytes())
    link.unlink()
    link.symlink_to("../../plain")


def _over_a_blob_that_is_a_link(cache: Path, link: Path) -> None:
    (cache.parent / "secret").write_bytes((cache / "blobs" / "b2").read_bytes())
    (cache / "blobs" / "b2").unlink()
    (cache / "blobs" / "b2").symlink_to("../../secret")


def _to_blobs_that_are_a_link(cache: Path, link: Path) -> None:
    (cache / "blobs").rename(cache.parent / "outside")
    (cache / "blobs").symlink_to("../outside")


def _to_the_blobs_of_another_cache(cache: Path, link: Path) -> None:
    other = cache.parent / "models--other" / "blobs"
    other.mkdir(parents=True)
    (other / "b2").write_bytes((cache / "blobs" / "b2").read_bytes())
    link.unlink()
    link.symlink_to("../../../../models--other/blobs/b2")


def _over_a_linked_directory(cache: Path, link: Path) -> None:
    real = link.parent / "real"
    real.mkdir()
    (real / "m.bin").write_bytes((cache / "blobs" / "b2").read_bytes())
    (link.parent / "linked").symlink_to("real")
    model = onnx.load(link.with_suffix(".onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "linked/m.bin" if entry.key == "location" else entry.value
    (cache / "blobs" / "b1").write_bytes(model.SerializeToString())


def _in_a_circle(cache: Path, link: Path) -> None:
    link.unlink()
    link.symlink_to(link.name)


def _to_a_pipe(cache: Path, link: Path) -> None:
    (cache / "blobs" / "b2").unlink()
    os.mkfifo(cache / "blobs" / "b2")


@pytest.mark.parametrize(
    "change",
    [
        _to_a_file_outside,
        _to_another_snapshot,
        _over_a_blob_that_is_a_link,
        _to_blobs_that_are_a_link,
        _to_the_blobs_of_another_cache,
        _over_a_linked_directory,
        _in_a_circle,
        _to_a_pipe,
    ],
)
def test_no_other_link_is_followed_from_a_model_cache(change, tmp_path):
    path = cached(tmp_path)
    change(tmp_path / "hub" / "models--me--net", path.with_suffix(".bin"))
    with pytest.raises(UnsupportedModel, match=r"is a symbolic link, which is followed only from a cache of Hugging"):
        load_model(path)


def test_a_cache_of_another_user_is_not_followed(tmp_path, monkeypatch):
    path = cached(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsupportedModel, match="in a directory of yours"):
        load_model(path)


def test_a_link_beside_a_model_outside_of_a_cache_is_not_followed(tmp_path):
    path = external(tmp_path)
    (tmp_path / "blobs").mkdir()
    path.with_suffix(".bin").rename(tmp_path / "blobs" / "m")
    path.with_suffix(".bin").symlink_to("blobs/m")
    with pytest.raises(UnsupportedModel, match="is a symbolic link"):
        load_model(path)

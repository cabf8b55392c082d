"""Registered models in a real MLflow store: which version a name means, downloads, aliases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onward.infra.mlflow.mlflow_store import TrackingError
from onward.infra.mlflow.registry import RegisteredVersion, Registry
from onward.infra.mlflow.tracking import Tracker
from tests.infra.mlflow.test_tracking import adder
from tests.support.stores import Server, client, new_run


def registry_of(tracker: Tracker) -> Registry:
    return Registry(tracker.tracking_uri)


def test_an_alias_names_one_version_and_moves(tmp_path: Path) -> None:
    tracker, name = new_run(), "moving"
    registry = registry_of(tracker)
    assert registry.served(name, "champion") is None  # there is no such model
    one, two = adder(tmp_path, by=1.0), adder(tmp_path, by=2.0)
    for model in (one, two):
        tracker.register_model(model, name=name)
    assert registry.served(name, "champion") is None  # nor such an alias
    first, second = RegisteredVersion(name, "1", one.sha256), RegisteredVersion(name, "2", two.sha256)
    registry.set_alias(first, "champion")
    assert registry.served(name, "champion") == first
    registry.set_alias(second, "champion")
    assert registry.served(name, "champion") == second
    registry.remove_alias(first, "champion")  # it names another version
    assert registry.served(name, "champion") == second
    registry.remove_alias(second, "champion")
    assert registry.served(name, "champion") is None


def test_a_uri_names_a_version_by_alias_number_or_as_the_latest_and_what_does_not_exist_is_said(tmp_path: Path) -> None:
    tracker, name = new_run(), "named"
    registry = registry_of(tracker)
    for by in (1.0, 2.0, 3.0):
        tracker.register_model(adder(tmp_path, by=by), name=name)
    registry.set_alias(registry.version(name, "2"), "champion")
    found = {uri: registry.resolve(f"models:/{name}{uri}") for uri in ("@champion", "/1", "/latest")}
    assert {uri: version.version for uri, version in found.items() if version} == {
        "@champion": "2",
        "/1": "1",
        "/latest": "3",
    }
    for uri, message in (
        ("models:/unknown/1", "no registered model 'unknown'"),
        (f"models:/{name}@best", r"no alias 'best'; its aliases are champion \(version 2\)"),
        (f"models:/{name}/9", "no version 9; its versions are 1, 2, 3"),
        (f"models:/{name}", "not of the form models:/NAME@ALIAS"),
    ):
        with pytest.raises(TrackingError, match=message):
            registry.resolve(uri)


@pytest.mark.parametrize("kind", ["database", pytest.param("server", marks=pytest.mark.slow)])
def test_a_version_and_a_file_of_a_run_are_downloaded_with_their_external_data(kind: str, tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    if kind == "server":
        server.start()
    try:
        tracker = new_run(server.uri if kind == "server" else "")
        plain = adder(tmp_path, by=4.0)
        path = tmp_path / "apart" / "adder.onnx"
        path.parent.mkdir()
        model = onnx.load(plain.path)
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full(2, 4.0, np.float32), "w"))
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        apart = replace(plain, path=path, beside=(path.parent / "weights.bin",))
        tracker.register_model(apart, name="downloaded")
        tracker.log_file(plain.path, "files")
        registry = registry_of(tracker)

        version = registry.version("downloaded", "1")
        file = registry.download(version, tmp_path / "one")
        weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(file).graph.initializer}
        assert file.parent == tmp_path / "one"
        assert weights["w"].tolist() == [4.0, 4.0]

        uri = f"runs:/{tracker.run_id}/files/{plain.path.name}"
        assert registry.resolve(uri) is None
        assert registry.download(uri, tmp_path / "two").read_bytes() == plain.path.read_bytes()
        assert registry.download(f"runs:/{tracker.run_id}/files", tmp_path / "three").name == plain.path.name
        assert {entry.name for entry in tmp_path.iterdir()} >= {"one", "two", "three"}
        assert not list(tmp_path.glob(".downloading-*"))
        with pytest.raises(TrackingError):
            registry.download(f"runs:/{tracker.run_id}/nothing", tmp_path / "four")
        assert not (tmp_path / "four").exists()
    finally:
        server.kill()


def test_a_version_is_described_by_tags_and_text(tmp_path: Path) -> None:
    tracker = new_run()
    tracker.register_model(adder(tmp_path, by=1.0), name="described")
    registry = registry_of(tracker)
    registry.describe(registry.version("described", "1"), {"onward.promotion": "candidate"}, "not better")
    version = client(tracker).get_model_version("described", "1")
    assert (version.tags["onward.promotion"], version.description) == ("candidate", "not better")

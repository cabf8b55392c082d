"""Find, download and promote the versions of registered models in MLflow.

models:/digits@champion     the version that the alias names          models:/digits/3      that version
models:/digits/latest       the newest version                        runs:/ID/model        a file or model of a run
"""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onward.infra.mlflow.mlflow_store import Store, TrackingError, translate_errors, with_password

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_VERSION = re.compile(r"models:/([^/@]+)(?:@([A-Za-z0-9_-]+)|/(\d+|latest))")


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model."""

    name: str
    version: str
    sha256: str
    """Digest of the ONNX file with its external data, as Onward registered it; "" for a version of other origin."""


class Registry(Store):
    """The model registry of an MLflow store (see Tracker). Every call may be repeated after an outage."""

    @translate_errors
    def served(self, name: str, alias: str) -> RegisteredVersion | None:
        """Return the version that an alias names; None if there is none, or no model of this name."""
        version = (self._aliases(name) or {}).get(alias)
        return _found(self._client.get_model_version(name, version)) if version else None

    @translate_errors
    def set_alias(self, version: RegisteredVersion, alias: str) -> None:
        """Let an alias name a version, and no other."""
        self._client.set_registered_model_alias(version.name, alias, version.version)

    @translate_errors
    def version(self, name: str, version: str) -> RegisteredVersion:
        """Return a version. Raises TrackingError if it does not exist."""
        return _found(self._client.get_model_version(name, version))

    @translate_errors
    def in_use(self, name: str) -> frozenset[str]:
        """Return the versions of a model that an alias names, and its newest one; none of a model that was deleted."""
        numbers = [int(each.version) for each in self._client.search_model_versions(f"name = '{name}'")]
        named = (self._aliases(name) or {}).values()
        # the newest stays in use without an alias, because a person may still decide about it
        return frozenset(map(str, [*named, *sorted(numbers)[-1:]]))

    @translate_errors
    def remove_alias(self, version: RegisteredVersion, alias: str) -> None:
        """Remove an alias if it names this version."""
        named = (self._aliases(version.name) or {}).get(alias)
        # another run may have moved the alias to its own version meanwhile
        if str(named) == version.version:
            self._client.delete_registered_model_alias(version.name, alias)

    @translate_errors
    def describe(self, version: RegisteredVersion, tags: Mapping[str, str], text: str) -> None:
        """Set tags of a version and its description, in Markdown."""
        for key, value in tags.items():
            self._client.set_model_version_tag(version.name, version.version, key, value)
        self._client.update_model_version(version.name, version.version, text)

    @translate_errors
    def resolve(self, uri: str) -> RegisteredVersion | None:
        """Return the version that a `models:/` URI names now; None for `runs:/`, which names a file.

        Raises TrackingError for a URI of another form, and for a model, version or alias that does not exist.
        """
        if uri.startswith("runs:/"):
            return None
        if not (found := _VERSION.fullmatch(uri)):
            raise TrackingError(
                f"{uri} is not of the form models:/NAME@ALIAS, models:/NAME/VERSION or models:/NAME/latest"
            )
        name, alias, number = found.groups()
        aliases = self._aliases(name)
        if aliases is None:
            raise TrackingError(f"{uri}: MLflow at {self.tracking_uri} has no registered model {name!r}")
        if alias:
            if alias not in aliases:
                known = ", ".join(f"{each} (version {at})" for each, at in sorted(aliases.items())) or "none"
                raise TrackingError(f"{uri}: {name} has no alias {alias!r}; its aliases are {known}")
            number = aliases[alias]
        versions = self._client.search_model_versions(f"name = '{name}'")
        numbers = sorted(int(each.version) for each in versions)
        # versions are numbered in the order of their registration
        wanted = numbers[-1] if number == "latest" and numbers else number
        if str(wanted) not in map(str, numbers):
            known = ", ".join(map(str, numbers[-10:])) or "none"
            raise TrackingError(f"{uri}: {name} has no version {number}; its versions are {known}")
        return next(_found(each) for each in versions if str(each.version) == str(wanted))

    def _aliases(self, name: str) -> dict[str, str] | None:
        """Return alias -> version of a model; None if there is no model of this name."""
        # asked of the model itself, because an alias that does not exist is an error like any other
        models = self._client.search_registered_models(f"name = '{name}'", max_results=1)
        return models[0].aliases if models else None

    @translate_errors
    def download(self, source: RegisteredVersion | str, folder: Path) -> Path:
        """Download a version, or what a `runs:/` URI names, into an empty or absent directory; return the ONNX file.

        Its external data lies beside it. Raises TrackingError for a model that is not ONNX.
        """
        for_people = source if isinstance(source, str) else f"version {source.version} of {source.name}"
        uri = source
        if isinstance(source, RegisteredVersion):
            uri = self._client.get_model_version_download_uri(source.name, source.version)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # the final name appears by one rename: no part of a model is ever taken for the model
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".downloading-") as partial:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecations inside MLflow
                from mlflow.artifacts import download_artifacts

                got = Path(
                    download_artifacts(
                        artifact_uri=str(uri),
                        dst_path=partial,
                        tracking_uri=with_password(self.tracking_uri),
                        registry_uri=with_password(self.tracking_uri),
                    )
                )
            file = _onnx_file(got, for_people)
            root = got if got.is_dir() else got.parent
            inside = file.relative_to(root)
            if not root.is_relative_to(partial):  # a local store gives its own directory
                shutil.copytree(root, Path(partial) / "copy")
                root = Path(partial) / "copy"
            # a rename onto a directory with files fails
            shutil.rmtree(folder, ignore_errors=True)
            root.rename(folder)
        return folder / inside


def _onnx_file(got: Path, what: str) -> Path:
    """Return the ONNX file of a downloaded model directory, or the file itself."""
    if got.is_file():
        return got
    if (got / "MLmodel").is_file():
        from mlflow.models import Model

        flavours = Model.load(str(got)).flavors
        if "onnx" not in flavours:
            raise TrackingError(f"{what} is no ONNX model: its flavours are {', '.join(flavours)}")
        return got / str(flavours["onnx"]["data"])
    files = sorted(got.rglob("*.onnx"))
    if len(files) != 1:
        names = ", ".join(str(file.relative_to(got)) for file in files) or "none"
        raise TrackingError(f"{what} is a directory with {len(files)} ONNX files ({names}); name the file")
    return files[0]


def _found(version: ModelVersion) -> RegisteredVersion:
    return RegisteredVersion(version.name, str(version.version), version.tags.get("sha256", ""))

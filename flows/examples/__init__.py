"""The example configurations that are installed with Onward, and the models and data that they train.

Those of MODELS need no files but a model: their data is built in. An example's file names a model in the repository's
`models/` folder, which `make` fills. By its name it runs in any directory, without the repository: it trains
`ONWARD_HOME/models/NAME.onnx`, which is written when it is needed. Those of FOLDERS (folders.py) have data files of
their own: `onward example NAME` writes a folder with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onward.flows.examples.folders import CONFIGS, FOLDERS
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    import onnx


def _squeezenet_digits() -> onnx.ModelProto:
    from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet

    return build_squeezenet(num_classes=10, image_size=64)


def _gpt2_stdlib() -> onnx.ModelProto:
    from onward.trainer.onnx_graph.examples.reference_models import build_gpt2

    return build_gpt2(vocab_size=256, sequence_length=256, num_layers=4, num_heads=4, width=128, dropout=0.0)


MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "gpt2-stdlib": _gpt2_stdlib,
    "squeezenet-digits": _squeezenet_digits,
}
"""Name of an example -> builds its model: the bytes that the commands at the top of its file write."""


@dataclass(frozen=True)
class Example:
    """One example configuration."""

    name: str
    model: Path
    """Where its model is written when it is run by name."""

    @property
    def config(self) -> Path:
        """Return its TOML file, in the installed package."""
        return CONFIGS / f"{self.name}.toml"

    def write_model(self) -> None:
        """Write the model, untrained, unless the file exists."""
        from onward.trainer.run.directory import onward_home
        from onward.trainer.run.durable_files import write_durably
        from onward.trainer.run.machine.private_home import make_private

        make_private(onward_home())
        if not self.model.exists():
            write_durably(self.model, MODELS[self.name]().SerializeToString())


def find_config(text: str) -> Path | Example:
    """Return the configuration file at a path, or else the example of that name.

    Raises ConfigError, with the names of the examples, when there is neither.
    """
    from onward.trainer.run.directory import onward_home

    if Path(text).is_file():
        return Path(text)
    if text in MODELS:
        return Example(text, onward_home() / "models" / f"{text}.onnx")
    # these have data of their own, which must be written somewhere that the user chooses
    if text in FOLDERS:
        raise ConfigError(
            f"the example {text} has files of its own: `onward example {text}` writes them into the folder {text}, and "
            f"then `onward run {text}/{text}.toml` trains it"
        )
    if Path(text).is_dir():
        raise ConfigError(f"{text} is a folder; give the path of a TOML file in it")
    raise ConfigError(
        f"no config file {text}; give the path of a TOML file, or the name of an example: {', '.join(MODELS)}"
    )

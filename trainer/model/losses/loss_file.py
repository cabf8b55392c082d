"""Load a loss of the user: a Python function, or an ONNX file, as `loss.file` names it.

    loss.file = "my_loss.py:smooth"     smooth(output, labels) -> the sum over the rows of a micro-batch, a scalar
    loss.file = "my_loss.onnx"          inputs (output, labels) -> [B], a loss for each row, or their mean, a scalar

The mean of a step divides by its rows, or by what `loss.count` returns, another function of the Python file
(data/schema/target_counts.py). A loss file must be a sum over rows (or their mean, times their number), so that it is
the same over any number of replicas and micro-batches. `output` is fp32, `labels` of `loss.label_type`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onward.trainer.config.named_files import named_file
from onward.trainer.errors import ConfigError
from onward.trainer.model.losses.loss_formulas import Formula, LossInputs
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.run.allowed_code import load_function
from onward.trainer.run.outcomes.ending_kinds import explain


def load_loss(file: str) -> Formula:
    """Return the formula of a file. Raises ConfigError if there is none, UnsupportedModel for ONNX operators."""
    named = named_file("loss.file", file)
    path = Path(named.location)
    if not path.is_file():
        raise ConfigError(f"loss.file: there is no file {path}")
    formula = _from_python(path, named.function) if named.is_code else _from_onnx(path)

    def loss(x: LossInputs) -> Tensor:
        try:
            return formula(x)
        except Exception:  # whatever the user's code raises
            # while memory is estimated, tensors have no values to choose elements by, such as output[labels > 0]; real
            # errors are those of the rehearsal. A graph that is recorded (export/training) must have the loss itself
            if not is_fake(x.output) or get_proxy_mode() is not None:
                raise
            return x.output.square().sum()

    return loss


def _from_python(path: Path, name: str) -> Formula:
    if not name:
        raise ConfigError(f"loss.file {str(path)!r} names no function; write {path.name}:my_function")
    function = load_function(path, name, "loss.file")

    def loss(x: LossInputs) -> Tensor:
        output = x.output
        labels = x.labels
        try:
            value = function(output, labels)
        except Exception as error:
            if explain(str(error)) is not None:
                raise  # memory or a device is the cause, and not the function
            raise ConfigError(
                f"loss.file {path}:{name} failed on output {list(output.shape)} and labels {list(labels.shape)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, Tensor) or value.ndim:
            what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
            raise ConfigError(f"loss.file {path}:{name} returned {what}, not the sum over the rows, a scalar tensor")
        return value.float()

    return loss


def _from_onnx(path: Path) -> Formula:
    module = to_module(load_model(path), base=path.parent, train=()).eval().requires_grad_(False)
    if len(module.input_names) != 2 or len(module.output_names) != 1:
        raise ConfigError(
            f"loss.file {path} has the inputs {', '.join(module.input_names)} and the outputs "
            f"{', '.join(module.output_names)}; it must have two inputs, output and labels, and one output"
        )
    devices = {torch.device("cpu")}

    def loss(x: LossInputs) -> Tensor:
        output = x.output
        labels = x.labels
        # only when the device changes: moving a module looks at all of its tensors
        if output.device not in devices:
            module.to(output.device)
            devices.clear()
            devices.add(output.device)
        value: Tensor = module(output, labels)
        if value.ndim == 0:
            return value.float() * x.size
        if value.shape != output.shape[:1]:
            raise ConfigError(
                f"loss.file {path} returned {list(value.shape)}, neither a scalar nor a loss for each of "
                f"{len(output)} rows"
            )
        return value.float().sum()

    return loss

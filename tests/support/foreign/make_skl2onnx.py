"""Write skl2onnx-*.onnx: scikit-learn's neural networks and linear models converted by skl2onnx.

python -m venv env && env/bin/pip install scikit-learn==1.9.1 skl2onnx==1.20.0
env/bin/python tests/support/foreign/make_skl2onnx.py
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from record import Changed, Written, write_files
from skl2onnx import to_onnx
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, StandardScaler

OPSET = 18
FEATURES = 64  # those of the digits


def mlp() -> Any:
    """A network behind the standard deviations of its inputs."""
    return make_pipeline(StandardScaler(), MLPClassifier((24, 16), max_iter=2, random_state=0))


def mlp_regressor() -> Any:
    """A network for one number."""
    return MLPRegressor(hidden_layer_sizes=(24,), activation="tanh", max_iter=2, random_state=0)


def logistic() -> Any:
    """A linear classifier behind the range of its inputs."""
    return make_pipeline(MinMaxScaler(), LogisticRegression(max_iter=5))


def linear() -> Any:
    """A linear regression of rows of length one."""
    return make_pipeline(Normalizer(), LinearRegression())


def trees() -> Any:
    """Trees in front of nothing: there is no weight to train."""
    return GradientBoostingClassifier(n_estimators=2, max_depth=2, random_state=0)


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mlp": ("MLP with input scaling", mlp),
    "mlp-regressor": ("MLP for regression", mlp_regressor),
    "logistic": ("logistic regression", logistic),
    "linear": ("linear regression", linear),
    "trees": ("gradient-boosted trees", trees),
}


@functools.cache
def fitted(name: str) -> Any:
    """Return the model after a short training, on random rows."""
    random = np.random.default_rng(0)
    rows, labels = random.uniform(0, 16, (300, FEATURES)).astype(np.float32), np.arange(300) % 10
    with warnings.catch_warnings(action="ignore"):  # the training was short, as it says
        return MODELS[name][1]().fit(rows, rows[:, 0] if name in ("mlp-regressor", "linear") else labels)


def export(name: str, path: Path, changed: Changed) -> None:
    """Write one of the models."""
    model = copy.deepcopy(fitted(name))
    for part in [step for _, step in model.steps] if hasattr(model, "steps") else [model]:
        if changed == "trainable" and hasattr(part, "coefs_"):
            part.coefs_ = [weight * 1.1 for weight in part.coefs_]
            part.intercepts_ = [weight + 0.1 for weight in part.intercepts_]
        elif changed == "trainable" and hasattr(part, "coef_"):
            part.coef_, part.intercept_ = part.coef_ * 1.1, part.intercept_ + 0.1
        elif changed == "others" and isinstance(part, (StandardScaler, MinMaxScaler)):
            part.scale_ = part.scale_ * 1.1
    plain = {"zipmap": False} if hasattr(model, "predict_proba") else None
    onx = to_onnx(model, np.zeros((1, FEATURES), np.float32), options=plain, target_opset=OPSET)
    path.write_bytes(onx.SerializeToString())


if __name__ == "__main__":
    files = [
        Written(name, architecture, {"X": {"shape": [FEATURES]}}, functools.partial(export, name))
        for name, (architecture, _) in MODELS.items()
    ]
    write_files("skl2onnx", ("skl2onnx", "scikit-learn", "onnx"), files)

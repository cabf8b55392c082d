"""Write sklearn-*.onnx: pipelines of scikit-learn whose outputs are labels and maps, converted by skl2onnx.

python -m venv env && env/bin/pip install scikit-learn==1.9.1 skl2onnx==1.20.0
env/bin/python tests/support/foreign/make_sklearn_pipelines.py

They are fitted for a moment only, so that training has something to improve. They have no record of what scikit-learn
trains: those of make_skl2onnx.py have one.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, Int64TensorType
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, OneHotEncoder, StandardScaler

FOLDER = Path(__file__).resolve().parent
OPSET = 18

pixels, digits = load_digits(return_X_y=True)
pixels = pixels.astype(np.float32)


def mlp() -> Any:
    """A network that has seen the data twice."""
    return MLPClassifier((16,), max_iter=2, random_state=0)


def write(name: str, pipeline: Any, rows: Any, labels: Any, *, maps: bool, types: Any = None) -> None:
    """Fit a pipeline and write it; with `maps`, its probabilities are a sequence of maps."""
    with warnings.catch_warnings(action="ignore"):  # the training was short
        pipeline.fit(rows, labels)
    model = to_onnx(
        pipeline, None if types else rows[:1], initial_types=types, options={"zipmap": maps}, target_opset=OPSET
    )
    (FOLDER / f"sklearn-{name}.onnx").write_bytes(model.SerializeToString())


def table(rows: int = 300) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Columns of a number, another number and a category in 0..3, and labels that depend on all three."""
    random = np.random.default_rng(0)
    numbers, kinds = random.normal(size=(rows, 2)), random.integers(0, 4, (rows, 1))
    return np.concatenate([numbers, kinds], 1), (numbers.sum(1) + kinds[:, 0] > 1.5).astype(int)


words = np.array(["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
write("strings", make_pipeline(StandardScaler(), mlp()), pixels, words[digits], maps=True)
write("binary", LogisticRegression(max_iter=1), pixels / 16, (digits > 4).astype(int), maps=True)
linear = make_pipeline(SimpleImputer(), Normalizer(), LogisticRegression(max_iter=1))
write("imputed", linear, pixels, digits, maps=False)
columns = ColumnTransformer([("numbers", StandardScaler(), [0, 1]), ("kinds", OneHotEncoder(), [2])])
named = [
    ("width", FloatTensorType([None, 1])),
    ("height", FloatTensorType([None, 1])),
    ("kind", Int64TensorType([None, 1])),
]
write("columns", make_pipeline(columns, mlp()), *table(), maps=False, types=named)
write("forest", RandomForestClassifier(3, max_depth=3, random_state=0), pixels, words[digits], maps=True)

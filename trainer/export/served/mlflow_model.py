"""What MLflow loads of a registered model: raw rows of a table, images or texts -> class and probability.

mlflow.pyfunc.load_model("models:/digits@champion").predict(frame)        a pandas DataFrame of the training columns
mlflow models serve -m models:/digits@champion --env-manager local        the same as JSON, images in base64
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from .predictor import Predictor
from .raw_inputs import read_recipe
from .result_columns import NoColumns, result_columns


class RawModel:
    """The file of a registered model with its preprocessing."""

    def __init__(self, folder: Path) -> None:
        self._predictor = Predictor(folder / "model.onnx", read_recipe(folder), folder)

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Return a DataFrame with the predicted columns, a row for each row of the input.

        Of outputs that are no columns, such as masks, it is output -> array. Raises ValueError with the columns that
        are missing and the rows that cannot be predicted. Images and audio are bytes: a path is refused, because it
        would be one of the server's own files.
        """
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        plain = frame.astype(object).where(frame.notna(), None)
        rows = {str(name): plain[name].tolist() for name in frame.columns}
        if self._predictor.detector:  # a row for each box
            return pd.DataFrame(self._predictor.predict(rows))
        outputs = self._predictor.outputs(rows)
        try:
            return pd.DataFrame(result_columns(outputs, self._predictor.meanings))
        except NoColumns:
            return outputs


def _load_pyfunc(path: str) -> RawModel:
    """Return the model of a directory that MLflow has downloaded; MLflow calls it by this name."""
    return RawModel(Path(path))

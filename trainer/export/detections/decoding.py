"""Predict with a detector whose file returns raw outputs, which its users decode: as its loss does. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.columns import Array
from onward.trainer.export.served.predictor import Predictor
from onward.trainer.model.losses.dense_heads.families import dense_detections


class DecodingPredictor(Predictor):
    """Decodes and suppresses boxes as the metric `map` does."""

    def found(self, results: Sequence[Array], size: tuple[int, int]) -> Array:
        assert self.detector
        loss = LossConfig.model_validate(self.detector["loss"])
        raw = [torch.from_numpy(np.ascontiguousarray(each, np.float32)) for each in results]
        return np.asarray(dense_detections(raw, loss)[0].numpy())

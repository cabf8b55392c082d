"""Jobs with tables: mixed columns, numbers to predict, several labels, a forecast, and a network of scikit-learn."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from tests.stories.pictures import WORDS
from tests.stories.story import Array, Recipe, Story, Trained, export, fit, split
from tests.support.foreign_files import FOLDER


def _write_parts(table: pd.DataFrame, folder: Path, held_out: int) -> None:
    folder.mkdir()
    for part, rows in split(len(table), held_out).items():
        table.iloc[rows].to_csv(folder / f"{part}.csv", index=False)


def _parts(folder: Path) -> list[pd.DataFrame]:
    return [pd.read_csv(folder / f"{part}.csv") for part in ("train", "val")]


# -- a table of numbers, of which some are missing, and words: an embedding and a network


class Patients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.textures = nn.Embedding(4, 3)
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, texture: torch.Tensor, measures: torch.Tensor) -> torch.Tensor:
        return self.body(torch.cat([self.textures(texture), measures], 1))  # type: ignore[no-any-return]


TEXTURES = ("coarse", "fine", "medium", "smooth")


def _write_patients(folder: Path) -> None:
    found = load_breast_cancer(as_frame=True)
    table = found.frame.filter(regex="^mean").rename(columns=lambda name: name.removeprefix("mean ").replace(" ", "_"))
    table["texture"] = pd.qcut(table["texture"], 4, labels=["smooth", "fine", "medium", "coarse"]).astype(str)
    table.loc[::17, "area"] = np.nan
    table.loc[5::23, "concavity"] = np.nan
    table["diagnosis"] = found.target_names[found.target]
    _write_parts(table, folder / "patients", 200)
    example = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 9))
    export(Patients(), example, folder / "model.onnx", input_names=["texture", "measures"], output_names=["diagnosis"])


def _score_patients(trained: Trained) -> Array:
    table = pd.read_csv(trained.folder / "patients" / "val.csv")
    return np.asarray(trained.predicted("patients/val.csv")["class"] == table["diagnosis"])


def _patients_by_hand(folder: Path, recipe: Recipe) -> Array:
    train, held_out = _parts(folder / "patients")
    numbers = train.drop(columns=["texture", "diagnosis"])

    def inputs(table: pd.DataFrame) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = (table[numbers.columns].fillna(numbers.mean()) - numbers.mean()) / numbers.std()
        textures = [TEXTURES.index(name) for name in table["texture"]]
        return torch.tensor(textures), torch.tensor(scaled.to_numpy(np.float32))

    module = Patients()
    labels = torch.tensor((train["diagnosis"] == "malignant").to_numpy(np.int64))
    fit(module, (*inputs(train), labels), nn.functional.cross_entropy, recipe)
    return np.asarray((module(*inputs(held_out)).argmax(1).numpy() == 1) == (held_out["diagnosis"] == "malignant"))


# -- a number far from 0 as the label, as it is


def _write_diabetes(folder: Path) -> None:
    table = load_diabetes(as_frame=True, scaled=False).frame.rename(columns={"target": "progression"})
    _write_parts(table, folder / "diabetes", 140)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    export(module, (torch.zeros(2, 10),), folder / "model.onnx", input_names=["features"], output_names=["progression"])


def _score_diabetes(trained: Trained) -> Array:
    table = pd.read_csv(trained.folder / "diabetes" / "val.csv")
    found = trained.predicted("diabetes/val.csv")["predicted_progression"]
    return np.asarray(-np.abs(found - table["progression"]))


def _diabetes_by_hand(folder: Path, recipe: Recipe) -> Array:
    train, held_out = (table.to_numpy() for table in _parts(folder / "diabetes"))
    epochs = round(recipe.steps * recipe.batch / len(train))
    network = MLPRegressor(
        hidden_layer_sizes=(32,),
        batch_size=recipe.batch,
        learning_rate_init=recipe.learning_rate,
        max_iter=epochs,
        random_state=0,
    )
    model = make_pipeline(StandardScaler(), TransformedTargetRegressor(network, transformer=StandardScaler()))
    with warnings.catch_warnings(action="ignore"):  # more epochs would fit the training rows still better
        model.fit(train[:, :-1], train[:, -1])
    return np.asarray(-np.abs(model.predict(held_out[:, :-1]) - held_out[:, -1]))


# -- several labels in a row


TRAITS = {"round": {0, 6, 8, 9}, "even": {0, 2, 4, 6, 8}, "small": {0, 1, 2, 3, 4}, "prime": {2, 3, 5, 7}}


def _write_traits(folder: Path) -> None:
    found = load_digits()
    table = pd.DataFrame(found.data, columns=[f"p{at}" for at in range(64)])
    for name, digits in TRAITS.items():
        table[name] = [int(digit in digits) for digit in found.target]
    _write_parts(table, folder / "traits", 500)
    export(
        _traits_module(), (torch.zeros(2, 64),), folder / "model.onnx", input_names=["pixels"], output_names=["traits"]
    )


def _traits_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))


def _score_traits(trained: Trained) -> Array:
    """A row scores 1 if all its labels are right."""
    table = pd.read_csv(trained.folder / "traits" / "val.csv")
    found = trained.predicted("traits/val.csv")
    right = [(found[f"probability_{name}"] > 0.5) == (table[name] == 1) for name in TRAITS]
    return np.asarray(np.all(right, axis=0))


def _traits_by_hand(folder: Path, recipe: Recipe) -> Array:
    parts = [table.to_numpy(np.float32) for table in _parts(folder / "traits")]
    scaler = StandardScaler().fit(parts[0][:, :64])
    (train, labels), (held_out, others) = (
        (torch.from_numpy(scaler.transform(part[:, :64])), torch.from_numpy(part[:, 64:])) for part in parts
    )
    module = _traits_module()
    fit(module, (train, labels), nn.functional.binary_cross_entropy_with_logits, recipe)
    return np.asarray(((module(held_out) > 0) == (others == 1)).all(1))


# -- a forecast: 28 days of temperatures -> the next 7


LENGTH, HORIZON = 28, 7


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, HORIZON))

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        return self.body(past)  # type: ignore[no-any-return]


def _write_weather(folder: Path) -> None:
    """Write four years of temperatures of about 12 degrees C; the last one is held out."""
    days, random = np.arange(1460), np.random.default_rng(0)
    weather = np.zeros(len(days))
    for day in days[1:]:
        weather[day] = 0.8 * weather[day - 1] + random.normal(0, 2)
    table = pd.DataFrame({"date": pd.Timestamp("2021-01-01") + pd.to_timedelta(days, "D")})
    table["temperature"] = (12 - 9 * np.cos(2 * np.pi * days / 365.25) + weather).round(1)
    (folder / "weather").mkdir()
    table[:1095].to_csv(folder / "weather" / "train.csv", index=False)
    table[1095:].to_csv(folder / "weather" / "val.csv", index=False)
    export(Forecast(), (torch.zeros(2, LENGTH),), folder / "model.onnx", input_names=["past"], output_names=["ahead"])


def _windows(table: pd.DataFrame) -> Array:
    found = np.lib.stride_tricks.sliding_window_view(table["temperature"].to_numpy(np.float32), LENGTH + HORIZON)
    return np.array(found)


def _score_weather(trained: Trained) -> Array:
    found = trained.predicted("weather/val.csv", trained.model.parents[1]).filter(regex="^predicted_").to_numpy()
    future = _windows(pd.read_csv(trained.folder / "weather" / "val.csv"))[:, LENGTH:]
    return np.asarray(-np.abs(found[: len(future)] - future).mean(1))


def _weather_by_hand(folder: Path, recipe: Recipe) -> Array:
    train, held_out = (_windows(table) for table in _parts(folder / "weather"))
    mean, scale = train.mean(), train.std()
    scaled = torch.from_numpy((train - mean) / scale)
    module = Forecast()
    fit(module, (scaled[:, :LENGTH], scaled[:, LENGTH:]), nn.functional.mse_loss, recipe)
    found = module(torch.from_numpy((held_out[:, :LENGTH] - mean) / scale)).detach().numpy() * scale + mean
    return np.asarray(-np.abs(found - held_out[:, LENGTH:]).mean(1))


# -- a pipeline of scikit-learn, as skl2onnx writes it: a scaler, and a network that has seen the data twice


NAMES = np.array(["nought", *WORDS[1:]])


def _write_pipeline(folder: Path) -> None:
    found = load_digits()
    table = pd.DataFrame(found.data, columns=[f"p{at}" for at in range(64)])
    table["digit"] = NAMES[found.target]
    _write_parts(table, folder / "digits", 500)
    shutil.copyfile(FOLDER / "sklearn-strings.onnx", folder / "model.onnx")


def _score_pipeline(trained: Trained) -> Array:
    table = pd.read_csv(trained.folder / "digits" / "val.csv")
    return np.asarray(trained.predicted("digits/val.csv")["class"] == table["digit"])


def _pipeline_by_hand(folder: Path, recipe: Recipe) -> Array:
    pixels, digits = load_digits(return_X_y=True)
    scaler, network = StandardScaler().fit(pixels), MLPClassifier((16,), max_iter=2, random_state=0)
    with warnings.catch_warnings(action="ignore"):  # two epochs, as make_sklearn_pipelines.py fits the file
        network.fit(scaler.transform(pixels), NAMES[digits])
    train, held_out = _parts(folder / "digits")
    network.set_params(learning_rate_init=recipe.learning_rate)
    random = np.random.default_rng(1)
    for _ in range(recipe.steps):
        rows = train.iloc[random.choice(len(train), recipe.batch, replace=False)]
        network.partial_fit(scaler.transform(rows.to_numpy()[:, :64].astype(float)), rows["digit"])
    found = network.predict(scaler.transform(held_out.to_numpy()[:, :64].astype(float)))
    return np.asarray(found == held_out["digit"])


TABLES = {
    "a table with words and gaps": Story(_write_patients, "patients", _score_patients, _patients_by_hand, at_least=0.8),
    "a number far from 0": Story(_write_diabetes, "diabetes", _score_diabetes, _diabetes_by_hand, at_least=-55),
    "several labels": Story(_write_traits, "traits", _score_traits, _traits_by_hand, at_least=0.6),
    "a forecast": Story(_write_weather, "weather", _score_weather, _weather_by_hand, at_least=-3.5),
    "a network of scikit-learn": Story(_write_pipeline, "digits", _score_pipeline, _pipeline_by_hand, at_least=0.8),
}

"""How long a training takes: what `onward plan --measure` predicts beside a real training, in many configurations.

    python -m tests.bench.time_prediction [--cases "GPT-2 8" ...] [--seconds 20]       about 20 minutes on 2 cores

The configurations are those of memory_prediction.py on one and two ranks, and some of small steps. In each, a plan
measures 10 steps under mpirun. Another plan, of a run of as many steps as take `--seconds`, uses that measurement, and
this run is trained with two evaluations and two checkpoints. Compared are the median step (after two that allocate) and
the whole training from the first line of its loop. Exits with 1 if more than one configuration is off by more than
ALLOWED.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import onward
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.history import RunHistory
from onward.trainer.run.timing.time_account import attempt_times
from tests.bench.memory_prediction import CASES, CONV, GPT, LLAMA, MODELS, WORDS, Sections, shown
from tests.support.runs import events, make_run, train_run

ALLOWED = 0.15
FIRST_STEPS = 2
BATCH = 8
Case = tuple[str, dict[str, Any], int, Sections]
SMALL_STEPS: list[Case] = [
    (CONV, {"data": 2}, 1, {}),
    (CONV, {}, 4, {}),
    (CONV, {}, 1, {"optimizer": {"name": "sgd"}}),
    (LLAMA, {"data": 2}, 1, {}),
    (WORDS, {"pipeline": 2}, 4, {}),
    (GPT, {"data": 2}, 4, {}),
]


def make(folder: Path, case: Case, *, num_steps: int) -> RunDir:
    """The run directory of one case."""
    name, parallel, micro_batches, sections = case
    build, columns = MODELS[name]
    train = {"global_batch_size": BATCH, "gradient_accumulation_steps": micro_batches, "num_steps": num_steps}
    return make_run(
        folder,
        build(),
        columns(4 * BATCH),
        train=train | {"log_period": 1, "evaluation_period": num_steps // 2},
        parallel=parallel,
        checkpoint={"period": num_steps // 2},
        **sections,
    )


def step_and_total_s(run: RunDir) -> tuple[float, float]:
    """The median step of a training but the first ones, and its time from the first line of the loop to the end."""
    steps = [float(event.values["train/step_s"]) for event in events(run, "scalars") if "train/step_s" in event.values]
    (times,) = attempt_times(RunHistory.of(run.events), [])
    return statistics.median(steps[FIRST_STEPS:]), (times.last_ms - times.began_ms) / 1000


def main() -> None:
    """Plan and train every configuration; print what was predicted and what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    off = []
    for case in CASES + SMALL_STEPS:
        title = f"{case[0]}: {shown(*case[1:])}"
        if not any(word in title for word in given.cases):
            continue
        with tempfile.TemporaryDirectory(prefix="time-prediction-") as folder:
            first = make(Path(folder) / "first", case, num_steps=20)
            if read_config(first).world_size > 2:
                continue
            pace = onward.plan(read_config(first), measure=10).time
            home = os.environ["ONWARD_HOME"]
            run = make(Path(folder) / "whole", case, num_steps=max(20, round(given.seconds / pace.step_s)))
            os.environ["ONWARD_HOME"] = home
            predicted = onward.plan(read_config(run)).time
            assert predicted.source == "measured", predicted
            train_run(run, timeout_s=400)
            step_s, total_s = step_and_total_s(run)
        assert predicted.total_s is not None
        off.append((predicted.step_s / step_s - 1, predicted.total_s / total_s - 1))
        print(
            f"{title:72} step {predicted.step_s * 1e3:6.0f} {step_s * 1e3:6.0f} ms {off[-1][0]:+4.0%}"
            f"   in all {predicted.total_s:5.1f} {total_s:5.1f} s {off[-1][1]:+4.0%}",
            flush=True,
        )
    within = [sum(abs(each[place]) <= ALLOWED for each in off) for place in (0, 1)]
    print(f"of {len(off)} configurations within {ALLOWED:.0%}: steps {within[0]}, in all {within[1]}")
    sys.exit(min(within) < len(off) - 1)


if __name__ == "__main__":
    main()

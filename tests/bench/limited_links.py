"""What `onward plan --hosts --network` predicts for slow links, beside real trainings on hosts with such links.

    python -m tests.bench.limited_links [--rates 100 400] [--hosts 2 3] [--steps 10]       10 min, as root

Each host is a set of namespaces with a network card of its own, whose rate `tc` limits with a token bucket (tbf). A
model of 2 million weights is trained by data parallelism, one rank on each host, first without limits and then with
them. Compared is what a step takes longer: the plan's step without its computing, and the median step with limits
without the one without. Exits with 1 if one is off by more than ALLOWED.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pandas as pd

from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_mlp
from tests.support.machines import Machines, machines, missing
from tests.support.runs import events
from tests.support.workshop import Workshop

ALLOWED = 0.35
FIRST_STEPS = 2
WIDTH = 1000
CONFIG = """
model = {{ path = "model.onnx", loss = "mse" }}
data = {{ source = "data.csv", label = "y", inputs = {{ features = {columns} }} }}
train = {{ global_batch_size = 12, num_steps = {steps}, log_period = 1, evaluation_period = 0 }}
parallel.data = {hosts}
checkpoint.period = 1000
launch = {{ rehearsal = "off", hostfile = "{hostfile}" }}
monitor = {{ report = false, report_to = [] }}
"""


def write(folder: Path, cluster: Machines, *, steps: int) -> None:
    """Write the model, its data and the configuration of one rank on each host."""
    names = [f"x{number}" for number in range(WIDTH)]
    onnx.save_model(tiny_mlp(inputs=WIDTH, hidden=2 * WIDTH), folder / "model.onnx")
    rows = np.random.default_rng(0).normal(size=(48, WIDTH)).astype(np.float32)
    pd.DataFrame(rows, columns=names).assign(y=rows[:, 0]).to_csv(folder / "data.csv", index=False)
    given = {"steps": steps, "hosts": cluster.number, "hostfile": cluster.hostfile(1)}
    (folder / "config.toml").write_text(CONFIG.format(columns=json.dumps(names), **given))


def limit(cluster: Machines, megabits_per_s: int) -> None:
    """Limit the network card of each host in both directions; 0 = not at all."""
    for number in range(cluster.number):
        # what a host sends is limited on its card, and what it receives on the port of the switch
        inside = [*cluster.on(f"h{number}"), "tc", "qdisc"]
        port = ["nsenter", "-t", str(cluster.switch.pid), "--net", "tc", "qdisc"]
        for words, device in ((inside, "eth0"), (port, f"port{number}")):
            subprocess.run([*words, "del", "dev", device, "root"], capture_output=True)
            if megabits_per_s:
                bucket = ["rate", f"{megabits_per_s}mbit", "burst", "128kb", "latency", "200ms"]
                subprocess.run([*words, "add", "dev", device, "root", "tbf", *bucket], check=True)


def median_step_s(workshop: Workshop, cluster: Machines) -> float:
    """Train, and return the median time of a step but the first ones."""
    before = {*(workshop.home / "runs").glob("*")}
    log = workshop.root / "run.log"
    words = [sys.executable, "-m", "onward.flows.cli", "run", "config.toml"]
    ended = cluster.start(words, workshop.environment, log).wait(600)
    assert ended == 0, log.read_text()[-3000:]
    (run,) = {*(workshop.home / "runs").glob("*-*")} - before
    steps = [event.values["train/step_s"] for event in events(RunDir(run), "scalars") if "train/step_s" in event.values]
    return statistics.median(map(float, steps[FIRST_STEPS:]))


def predicted_s(workshop: Workshop, hosts: int, megabits_per_s: int) -> float:
    """Return what a step waits for the network, as the plan says: the messages of any device are as large."""
    options = [
        "--device",
        "H100",
        "--hosts",
        f"{hosts}x1",
        "--network",
        f"{megabits_per_s}Mbit/s",
        "--latency",
        "100us",
        "--json",
    ]
    words = [sys.executable, "-m", "onward.flows.cli", "plan", "config.toml", *options]
    shown = subprocess.run(words, env=workshop.environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(shown)
    return float(found["step_s"]) - float(found["compute_s"])


def main() -> None:
    """Plan and train with every limit; print what was predicted and what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", type=int, default=[100, 400], help="Mbit/s")
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 3])
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    if why := missing("tc"):
        sys.exit(why)
    off = []
    print("what a step takes longer because of the links")
    for hosts in given.hosts:
        with tempfile.TemporaryDirectory(prefix="limited-links-") as folder, contextlib.chdir(folder):
            workshop = Workshop(Path(folder))
            workshop.home.mkdir()
            with machines(workshop.root / "machines", hosts) as cluster:
                write(workshop.root, cluster, steps=given.steps)
                unlimited_s = median_step_s(workshop, cluster)
                for rate in given.rates:
                    limit(cluster, rate)
                    measured_s = median_step_s(workshop, cluster) - unlimited_s
                    limit(cluster, 0)
                    said_s = predicted_s(workshop, hosts, rate)
                    off.append(said_s / measured_s - 1)
                    times = f"predicted {said_s * 1e3:6.0f} ms, measured {measured_s * 1e3:6.0f} ms"
                    print(f"{hosts} hosts, {rate:5} Mbit/s: {times}, {off[-1]:+.0%}", flush=True)
            workshop.close()
    sys.exit(any(abs(each) > ALLOWED for each in off))


if __name__ == "__main__":
    main()

"""`onward plan --device H100 --hosts 8x8`: a cluster that is not here: its options, its times and its failures."""

from __future__ import annotations

import io
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from onward.flows import api, cli
from onward.flows.planning.checkpoint_period import best_period, checkpoint_times, lost_share
from onward.flows.planning.cluster_options import read_cluster
from onward.tasks.checks.rehearsing import _show_progress
from onward.trainer.config.loading import load_config
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.parallel.planning.cluster import PROGRESS, THIS_MACHINE, Cluster
from onward.trainer.parallel.planning.plan_record import Plan
from onward.trainer.parallel.planning.planner import plan, refuse_absent_gpu
from onward.trainer.run.records import Needs

HOUR = 3600.0


# -- options


def test_the_options_are_read_in_their_units() -> None:
    found = read_cluster(device="h100", hosts="8x4", network="400Gbit/s", latency="5us", storage="2GB/s", failures="6h")
    assert (found.gpu, found.hosts, found.ranks_per_host) == ("h100", 8, 4)
    numbers = (found.network_bytes_per_s, found.latency_s, found.storage_bytes_per_s, found.failures_every_s)
    assert numbers == pytest.approx((50e9, 5e-6, 2e9, 6 * HOUR))
    assert found.num_ranks == 32
    assert read_cluster() == Cluster()


def test_everything_that_is_wrong_in_the_options_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read_cluster(device="K80", hosts="8", network="50", latency="5 parsecs", storage="0GB/s", failures="-6h")
    gpu, hosts, network, latency, storage, failures = refused.value.problems
    assert gpu.startswith("--device K80: the rates of this GPU are not known. Known are GB300, ")
    assert "H100 PCIe" in gpu
    assert "$" not in gpu
    assert hosts == "--hosts 8: write hosts x GPUs of each, such as 8x8"
    assert network.startswith(
        "--network 50: write a number and a unit, such as 50GB/s or 400Gbit/s; units are B/s, kB/s"
    )
    assert latency.startswith("--latency 5 parsecs: write a number and a unit, such as 5us; units are ns, us")
    assert storage == "--storage 0GB/s: it must be more than 0"
    assert failures.startswith("--failures-every -6h: write a number and a unit, such as 6h")


@pytest.mark.parametrize("hosts", ["0x8", "8x0", "8x8x8", "x", "-1x8", "8.5x8", "99999999x8", "9999999x9999999"])
def test_a_number_of_hosts_that_is_none_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match="--hosts "):
        read_cluster(device="H100", hosts=hosts)


def test_hosts_without_a_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="name one, such as --device H100"):
        read_cluster(hosts="2x2")


# -- plans


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TOML file of GPT-2 with 4 layers."""
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    model = build_gpt2(vocab_size=96, sequence_length=12, num_layers=4, num_heads=4, width=64, dropout=0.0)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    rows = np.zeros((80, 12), np.int64)
    np.savez(tmp_path / "rows.npz", input_ids=rows, label=rows)
    file = tmp_path / "small.toml"
    file.write_text(
        'model.path = "model.onnx"\ndata.source = "rows.npz"\ntrain.num_steps = 100\ntrain.global_batch_size = 64\n'
    )
    return file


def planned(configuration: Path, *changes: str, **options: str) -> Plan:
    """Return the plan of this process for H100."""
    cluster = read_cluster(device="H100", **options)
    return plan(load_config(configuration, [*changes, f"launch.num_ranks={cluster.num_ranks}"]), None, cluster)


@pytest.mark.slow
def test_a_cluster_decides_the_ranks_the_times_and_what_failures_cost(configuration: Path) -> None:
    words = ["--device", "H100", "--hosts", "2x4", "--network", "50GB/s", "--latency", "5us", "--failures-every", "6h"]
    given = ["parallel.data=8", "launch.device=cuda"]
    result = CliRunner().invoke(cli.app, ["plan", str(configuration), *given, *words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["num_ranks"] == 8
    assert found["device"].startswith("H100, ")
    assert "2 hosts of 4, 40 GB/s and 5 us between them" in found["device"]
    assert 0 < found["compute_s"] < found["step_s"]
    assert found["reserve"]["context"] > 0
    assert not any("--measure" in text for text in found["time"]["guessed"]), "it cannot measure that cluster"
    times = found["checkpoint_times"]
    assert times["failures_every_s"] == 6 * HOUR
    assert 0 < times["best_loss"] <= times["loss"] <= 1


def test_a_gpu_that_is_not_here_is_refused_unless_it_is_named(configuration: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch finds no GPU on this machine.*`onward plan --device NAME`"):
        refuse_absent_gpu(LaunchConfig(device="cuda"), THIS_MACHINE)
    refuse_absent_gpu(LaunchConfig(device="cuda"), read_cluster(device="H100"))
    refuse_absent_gpu(LaunchConfig(), THIS_MACHINE)
    result = CliRunner().invoke(cli.app, ["plan", str(configuration), "--device", "H100", "--measure"])
    assert isinstance(result.exception, ConfigError)
    assert "--measure trains on this machine" in str(result.exception)


def test_sizes_with_another_product_than_the_hosts_have_are_refused(configuration: Path) -> None:
    cluster = read_cluster(device="H100", hosts="8x8")
    with pytest.raises(ConfigError, match=r"launch\.num_ranks.*64"):
        api.plan(str(configuration), {"parallel.data": 8}, cluster=cluster)


@pytest.mark.slow
def test_a_slower_network_more_hosts_and_a_longer_way_take_longer(configuration: Path) -> None:
    def waited(**options: str) -> float:
        found = planned(configuration, "parallel.data=8", **options)
        return found.step_s - found.compute_s

    fast = waited(hosts="2x4", network="50GB/s", latency="5us")
    assert waited(hosts="1x8", network="50GB/s", latency="5us") < fast
    assert waited(hosts="2x4", network="1MB/s", latency="5us") > 100 * fast
    assert waited(hosts="2x4", network="50GB/s", latency="50ms") > 100 * fast


def test_the_memory_of_a_named_gpu_limits_auto(configuration: Path) -> None:
    assert planned(configuration, "parallel=auto", hosts="1x2").memory_bytes == 80 << 30


def test_auto_says_how_far_it_is_and_skips_what_cannot_be_faster(
    configuration: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = planned(configuration, "parallel=auto", hosts="1x8")
    assert found.num_ranks == 8
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith(PROGRESS)]
    assert said[0] == "planning: 1 of 10 divisions: data 8 x tensor 1 x pipeline 1"
    assert len(said) == 10
    assert len(found.considered) == 9
    skipped = [text for text in found.considered if "at least" in text]
    # what was skipped has no shorter step when it is estimated
    sizes = [int(word.strip(":")) for word in skipped[0].split()[:8] if word.strip(":").isdigit()]
    given = [f"parallel.{axis}={size}" for axis, size in zip(("data", "tensor", "pipeline"), sizes, strict=True)]
    other = planned(configuration, *given, f"train.gradient_accumulation_steps={4 * sizes[2]}", hosts="1x8")
    assert other.step_s > found.step_s


def test_a_line_says_how_far_a_process_is(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    log.touch()
    program = (
        "import sys, time\n"
        "for number in range(3): print('INFO: planning:', number + 1, 'of 3', flush=True); time.sleep(0.6)"
    )
    shown = io.StringIO()
    with log.open("wb") as output, subprocess.Popen([sys.executable, "-c", program], stdout=output) as process:
        _show_progress(process, log, shown)
    assert shown.getvalue() == "planning: 1 of 3\nplanning: 2 of 3\nplanning: 3 of 3\n"


# -- failures


def test_the_best_period_is_youngs_for_short_checkpoints_and_none_nearby_is_better() -> None:
    assert best_period(1.0, 100 * HOUR) == pytest.approx(math.sqrt(2 * 1.0 * 100 * HOUR), rel=0.01)
    for wait_s in (1.0, 60.0, 600.0):
        best = best_period(wait_s, 6 * HOUR)
        least = lost_share(best, wait_s, 0.0, 6 * HOUR)
        assert all(lost_share(best * factor, wait_s, 0.0, 6 * HOUR) > 0.999 * least for factor in (0.5, 0.8, 1.25, 2.0))
    assert best_period(3 * HOUR, HOUR) == HOUR, "checkpoints take longer than the run lasts"


def test_the_lost_share_agrees_with_a_simulation_of_failures() -> None:
    generator = random.Random(0)
    wait_s, failures_s, restart_s, period_s = 20.0, 2 * HOUR, 90.0, 600.0
    clock = useful = 0.0
    failure = generator.expovariate(1 / failures_s)
    while clock < 4000 * HOUR:
        if clock + period_s + wait_s < failure:
            clock += period_s + wait_s
            useful += period_s
        else:
            # what was trained since the last checkpoint is lost
            clock = failure + restart_s
            failure = clock + generator.expovariate(1 / failures_s)
    assert lost_share(period_s, wait_s, restart_s, failures_s) == pytest.approx(1 - useful / clock, abs=0.015)


def test_a_checkpoint_that_is_written_beside_the_training_waits_less_and_is_complete_as_late() -> None:
    saving = CheckpointConfig(minutes=10.0)
    cluster = Cluster(storage_bytes_per_s=1e9, failures_every_s=6 * HOUR)

    size = 100 * 10**9
    needs = Needs(rank_bytes=0, activation_bytes=0, checkpoint_bytes=size, model_bytes=0)

    def times(*, beside: bool) -> Any:
        return checkpoint_times(saving, cluster, needs, ranks=10, copied=size * beside, step_s=1.0)

    waits, beside = times(beside=False), times(beside=True)
    assert waits.write_s == beside.write_s == 100.0
    assert (waits.wait_s, beside.wait_s) == (100.0, 1.0)
    assert beside.best_period_s == pytest.approx(math.sqrt(2 * 6 * HOUR), rel=0.01), "Young's"
    assert beside.best_loss < waits.best_loss < 1
    assert waits.period_s == 600.0
    never = checkpoint_times(CheckpointConfig(minutes=0.0), cluster, needs, ranks=1, copied=0, step_s=1.0)
    assert (never.period_s, never.loss) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("period", "minutes", "step_s", "period_s"),
    [
        (100, 10.0, 1.0, 100.0),
        (1000, 10.0, 1.0, 600.0),
        (1000, 0.0, 1.0, 1000.0),
        (1000, 10.0, 0.0, 600.0),
        (1000, 0.0, 0.0, 0.0),
    ],
)
def test_checkpoints_by_steps_and_by_minutes_are_as_far_apart_as_the_more_frequent_ones(
    period: int, minutes: float, step_s: float, period_s: float
) -> None:
    saving = CheckpointConfig(period=period, minutes=minutes)
    cluster = Cluster(storage_bytes_per_s=1e9, failures_every_s=6 * HOUR)
    needs = Needs(rank_bytes=0, activation_bytes=0, checkpoint_bytes=10**9, model_bytes=0)
    assert checkpoint_times(saving, cluster, needs, ranks=1, copied=0, step_s=step_s).period_s == period_s

"""Instrumentation without a line of code: real scripts in processes of their own, as a user starts them, without servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_forge.cli.running import STARTUP
from otel_forge.config import load_config, step_settings
from otel_forge.errors import ConfigError

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]


class Place:
    """A directory in which scripts run, and what comes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "forge.yaml"
        self.environ = dict(os.environ) | {"OTEL_FORGE_CONFIG": str(self.config), "PYTHONWARNINGS": "default"}
        self.path = [str(STARTUP), str(ROOT), str(ROOT / "exporters"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]

    def run(self, *command: str, instrument: str | None = None, step: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        lines = ["metric_logging: {jsonl: {path: rows.jsonl}}", "collector: {shape: inprocess}"]
        self.config.write_text("\n".join([*lines, step]))
        environ = self.environ | {"PYTHONPATH": os.pathsep.join(self.path)} | more
        if instrument is not None:
            environ["OTEL_FORGE_INSTRUMENT"] = instrument
        done = subprocess.run([sys.executable, *command], cwd=self.folder, env=environ, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "rows.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def scopes(self) -> list[set[str]]:
        """Names of the scopes in each row."""
        return [{key.partition("/total_duration")[0] for key in row["metrics"] if key.endswith("total_duration_avg_s")} for row in self.rows]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


SCRIPT = str(SCRIPTS / "train_plain.py")
TRAINED = {"Trainer/train_step", "Trainer/loss_of", "Trainer/report", "Network/forward", "step"}


def test_classes_and_functions_of_the_script_and_of_what_it_imports_are_traced(place: Place) -> None:
    """Five steps, each with what it did; before the first and after the last what was done there. What the script pickles is as ever."""
    done = place.run(
        SCRIPT, instrument="train_plain:Trainer.*, train_plain:evaluate, train_plain:Settings.*, plain_model:Network.forward, plain_model:warm_up"
    )
    assert [row["step"] for row in place.rows] == [0, 1, 2, 3, 4, 5]
    scopes = place.scopes()
    assert scopes[0] == TRAINED | {"warm_up"}
    assert scopes[1:5] == [TRAINED] * 4
    assert scopes[5] == {"Trainer/fit", "Trainer/loss_of", "Network/forward", "Settings/describe", "evaluate"}
    assert "loss" in done.stdout
    assert "otel-forge" not in done.stderr
    assert _unpickled_elsewhere(place) == "5 steps\n"


def _unpickled_elsewhere(place: Place) -> str:
    """What the script pickled, in a process without otel-forge."""
    code = "import pickle, sys; sys.path.insert(0, sys.argv[1]); import train_plain; sys.modules['__main__'] = train_plain;"
    code += "sys.modules['otel_forge'] = None; print(pickle.load(open('settings.pickle', 'rb'))[0].describe())"
    environ = {"PYTHONPATH": "", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPTS)], cwd=place.folder, env=environ, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_a_module_run_by_its_name(place: Place) -> None:
    place.path.append(str(SCRIPTS))
    place.run("-m", "train_plain", "--steps", "2", instrument="train_plain:Trainer.train_step,train_plain:main")
    assert [(row["step"], scopes) for row, scopes in zip(place.rows, place.scopes(), strict=True)] == [
        (0, {"step", "Trainer/train_step"}),
        (1, {"step", "Trainer/train_step"}),
        (2, {"main"}),
    ]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_torchrun_s_agent_and_the_workers_of_a_data_loader_are_left_alone(place: Place, start_method: str) -> None:
    """Rows of one rank only, and nothing of `Numbers.load`, which runs in workers; gradient accumulation makes one step of two batches."""
    command = [*TORCHRUN, SCRIPT, "--steps", "3", "--accumulate", "2", "--workers", "2", "--start-method", start_method]
    done = place.run(*command, instrument="torch,train_plain:Trainer.train_step,train_plain:Numbers.load")
    assert [(row["step"], row["rank"], row["world_size"]) for row in place.rows] == [(step, None, 1) for step in range(4)]
    expected = {"step", "Trainer/train_step", "data/wait", "ddp/forward", "ddp/backward_wait", "optimizer/step"}
    assert place.scopes()[1:3] == [expected] * 2
    assert "otel-forge" not in done.stderr


def test_a_text_that_names_nothing_is_said_once(place: Place) -> None:
    """By rank 0, at the end. Looking for it to the end changes nothing in what the script pickles."""
    done = place.run(*TORCHRUN, SCRIPT, instrument="train_plain:Triner.*,plain_model:Network.forward,nowhere.to.be.found:x,nonsense")
    assert _unpickled_elsewhere(place) == "5 steps\n"
    said = [line for line in done.stderr.splitlines() if "otel-forge" in line]
    assert [line for line in said if "'train_plain:Triner.*', 'nowhere.to.be.found:x'" in line] == [
        line for line in said if "nothing was found" in line
    ]
    assert sum("nothing was found" in line for line in said) == 1
    assert sum("'nonsense' is not of the form" in line for line in said) == 1


def test_a_method_s_end_is_the_step_s(place: Place) -> None:
    """Also when it is in the file, and no text names what else to instrument."""
    place.run(SCRIPT, step='step: {on: method, method: "train_plain:Trainer.report"}')
    assert [row["step"] for row in place.rows] == list(range(5))
    assert place.scopes() == [{"step", "Trainer/report"}] * 5


def test_a_program_that_names_its_own_steps_keeps_them(place: Place) -> None:
    (place.folder / "own.py").write_text(
        "import otel_forge, torch\n"
        "otel_forge.init(run_config={'lr': 1})\n"
        "weight = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for number in range(10, 13):\n"
        "    with otel_forge.step(number):\n"
        "        (weight * 2).sum().backward()\n"
        "        optimizer.step()\n"
        "        otel_forge.record_metric('loss', number)\n"
    )
    done = place.run("own.py", instrument="torch")
    assert "names its steps itself" not in done.stderr  # nobody asked for others
    assert [(row["step"], row["occurrence"], row["metrics"]["loss"]) for row in place.rows] == [(10, 0, 10), (11, 0, 11), (12, 0, 12)]
    assert [scopes - {"step"} for scopes in place.scopes()] == [{"optimizer/step"}] * 3


def test_init_with_a_configuration_instruments_too(place: Place) -> None:
    (place.folder / "late.py").write_text(
        "import otel_forge\n"
        "class Loop:\n"
        "    def run(self): return 1\n"
        "config = {'metric_logging': {'jsonl': {'path': 'rows.jsonl'}}, 'collector': {'shape': 'inprocess'}}\n"
        "otel_forge.init(config | {'instrument': ['late:Loop.*'], 'step': {'on': 'method', 'method': 'late:Loop.run'}})\n"
        "[Loop().run() for _ in range(3)]\n"
    )
    place.path.remove(str(STARTUP))
    place.run("late.py", instrument=None)
    assert place.scopes() == [{"step", "Loop/run"}] * 3


def test_another_sitecustomize_still_runs_and_a_wrong_configuration_stops_nothing(place: Place) -> None:
    (place.folder / "site").mkdir()
    (place.folder / "site" / "sitecustomize.py").write_text("print('the other one')\n")
    (place.folder / "hello.py").write_text("print('hello')\n")
    place.path.append(str(place.folder / "site"))
    done = place.run("hello.py", step="instrumnt: [torch]")
    assert done.stdout == "the other one\nhello\n"
    assert "did you mean 'instrument'?" in done.stderr


def test_programs_that_train_nothing_cost_no_telemetry(place: Place) -> None:
    (place.folder / "tool.py").write_text("import sys\nprint(sorted(name for name in sys.modules if name.startswith('opentelemetry')))\n")
    done = place.run("tool.py", instrument="torch")
    assert done.stdout == "[]\n"
    assert place.rows == []


def test_opentelemetry_instrument_starts_it(place: Place) -> None:
    """By the entry point, which an installed package has."""
    pytest.importorskip("opentelemetry.instrumentation.auto_instrumentation")
    project = (ROOT / "pyproject.toml").read_text()
    info = place.folder / "site" / "otel_forge-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: otel-forge\nVersion: 0.1.0\n")
    entry = project.partition("[project.entry-points.opentelemetry_instrumentor]\n")[2].partition("\n")[0].replace('"', "")
    (info / "entry_points.txt").write_text(f"[opentelemetry_instrumentor]\n{entry}\n")
    place.path[0] = str(place.folder / "site")
    starter = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
    place.run("-c", starter, sys.executable, *TORCHRUN, SCRIPT, instrument="torch,train_plain:Trainer.train_step")
    assert [row["step"] for row in place.rows] == list(range(6))
    assert place.scopes()[1] >= {"step", "data/wait", "Trainer/train_step", "optimizer/step"}


def test_what_ends_a_step_is_checked() -> None:
    with pytest.raises(ConfigError, match="go together"):
        load_config({"step": {"on": "method"}})
    config = load_config({"step": {"on": "optimizer"}})
    assert step_settings(config, {"OTEL_FORGE_STEP": "train:Trainer.step"}).method == "train:Trainer.step"
    assert step_settings(config, {"OTEL_FORGE_STEP": "manual"}).on == "manual"
    assert step_settings(config, {}).on == "optimizer"
    with pytest.raises(ConfigError, match="OTEL_FORGE_STEP: expected optimizer"):
        step_settings(config, {"OTEL_FORGE_STEP": "optimiser"})

"""`otel-forge doctor`: each thing that can be wrong is named, with what to do; what is right is said in a line."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from otel_forge import discovery
from otel_forge.cli.doctor import file_system
from otel_forge.discovery import ServerProcess, Servers
from tests.cli.rows import run

MOUNTS = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:40 / /home rw shared:1 - nfs4 server:/home rw
3 2 0:41 / /home/me/scratch rw - lustre mds:/x rw
4 1 0:42 / /var/with\\040space rw - tmpfs tmpfs rw
"""


def _checks(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = run("doctor", "--json", *arguments)
    return done.exit_code, {check["name"]: check for check in json.loads(done.output)["checks"]}


def test_without_anything_all_is_well_and_the_shape_is_in_process(tmp_path: Path) -> None:
    code, checks = _checks()
    assert code == 0, checks
    assert checks["shape"]["found"].startswith("inprocess")
    assert checks["rank"]["found"].startswith("trainer rank 0 of 1")
    assert checks["state"]["found"].startswith(str(tmp_path / "state"))
    assert not (tmp_path / "state").exists(), "it makes nothing"


def test_an_endpoint_where_nothing_listens_fails_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv("OTEL_FORGE_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        code, checks = _checks()
        assert (code, checks["endpoint"]["state"]) == (1, "fail")
        assert "cannot connect" in checks["endpoint"]["found"]
        assert "otel-forge up" in run("doctor").output


def test_a_configuration_with_mistakes_fails_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    path = tmp_path / "forge.yaml"
    path.write_text("metric_logging: {wanb: {}}\n")
    code, checks = _checks("--config", str(path))
    assert (code, checks["config"]["state"]) == (1, "fail")
    assert "did you mean 'wandb'?" in checks["config"]["found"]
    assert checks["config"]["mend"] == f"otel-forge validate {path}"
    assert "shape" in checks


def test_a_backend_whose_module_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "forge.yaml"
    path.write_text("metric_logging: {mine: {class: 'no_such_package.module:Backend'}, jsonl: {}}\n")
    code, checks = _checks("--config", str(path))
    assert (code, checks["backend mine"]["found"]) == (1, "the module no_such_package.module is not installed")
    assert "backend jsonl" not in checks


def test_a_state_directory_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OTEL_FORGE_STATE_DIR", str(tmp_path / "file" / "state"))
    code, checks = _checks()
    assert (code, checks["state"]["state"]) == (1, "fail")
    assert "OTEL_FORGE_STATE_DIR" in checks["state"]["mend"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/tmp/x", "ext4"), ("/home/me", "nfs4"), ("/home/me/scratch/a/b", "lustre"), ("/homes", "ext4"), ("/var/with space/x", "tmpfs")],
)
def test_the_file_system_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_an_own_program_that_is_none_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_FORGE_COLLECTOR_BIN", str(tmp_path / "nowhere"))
    code, checks = _checks()
    assert (code, checks["otelcol-forge"]["state"]) == (1, "fail")
    assert "OTEL_FORGE_COLLECTOR_BIN" in checks["otelcol-forge"]["mend"]


def test_servers_that_are_gone_are_named_with_their_log(tmp_path: Path) -> None:
    gone = ServerProcess("collector", 2**22 + 1, 1, "another boot", "/some/collector.log")
    (tmp_path / "state").mkdir()
    discovery.write(tmp_path / "state", Servers("collector", "http://127.0.0.1:9", None, "http://127.0.0.1:9", None, (), 1.0, (gone,)))
    code, checks = _checks()
    assert (code, checks["collector"]["state"]) == (1, "fail")
    assert "/some/collector.log" in checks["collector"]["found"]
    assert checks["collector"]["mend"] == "otel-forge down, then otel-forge up"


@pytest.mark.parametrize(
    ("environ", "rank", "run_id", "state"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, "rank 3 of 8 (RANK and WORLD_SIZE)", "OTEL_FORGE_RUN_ID", "warn"),
        ({"RANK": "3", "WORLD_SIZE": "8", "OTEL_FORGE_RUN_ID": "my run"}, "rank 3 of 8", "my-run (OTEL_FORGE_RUN_ID)", "ok"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"},
            "rank 1 of 2", "a new one for each launch of torchrun", "ok",
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"},
            "rank 2 of 4 (SLURM_PROCID", "slurm-17.0", "ok",
        ),
    ],
)  # fmt: skip
def test_what_init_would_decide(environ: dict[str, str], rank: str, run_id: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    _, checks = _checks()
    assert rank in checks["rank"]["found"]
    assert run_id in checks["run id"]["found"] + checks["run id"]["mend"]
    assert checks["run id"]["state"] == state
    assert checks["shape"]["state"] == "warn", "several ranks and nothing to send to"
    assert "otel-forge run" in checks["shape"]["mend"]


def test_a_proxy_is_named_without_its_password_unless_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:1")
    monkeypatch.setenv("OTEL_FORGE_ENDPOINT", "http://collector.invalid:4318")
    _, checks = _checks()
    assert checks["proxy"]["found"] == "packets to collector.invalid go through 127.0.0.1:1"
    assert checks["proxy"]["mend"].endswith("NO_PROXY=collector.invalid")
    assert "secret" not in json.dumps(checks)
    monkeypatch.setenv("no_proxy", "collector.invalid")
    assert _checks()[1]["proxy"]["state"] == "ok"


def test_telemetry_that_is_turned_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert _checks()[1]["switch"]["state"] == "warn"

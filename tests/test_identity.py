"""Member, run and attempt, as each launcher gives them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from otel_forge.identity import Member, clean_id, process_facts, resolve_member, resolve_run


def test_a_plain_program_is_rank_0_of_1() -> None:
    assert resolve_member(None, 0, None, None, {}) == Member("trainer", 0, 0, 1)


def test_arguments_beat_the_launcher_and_the_launcher_beats_slurm() -> None:
    environ = {"RANK": "2", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "OTEL_FORGE_ROLE": "generator"}
    assert resolve_member(None, 0, None, None, environ) == Member("generator", 0, 2, 4)
    assert resolve_member("x", 1, 7, 8, environ) == Member("x", 1, 7, 8)
    del environ["RANK"]
    assert resolve_member(None, 0, None, None, environ).rank == 1


def test_slurm_variables_of_a_batch_script_are_no_rank() -> None:
    """SLURM_NTASKS and SLURM_PROCID are set in the batch script itself; only a step has SLURM_STEP_NUM_TASKS."""
    assert resolve_member(None, 0, None, None, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).world_size == 1


def _torchrun(**more: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "X", **more}


SCRIPT = """
import os, sys
from pathlib import Path
from otel_forge.identity import *
member = resolve_member(None, 0, None, None, os.environ)
run = resolve_run(None, member, os.environ, process_facts(), launches_dir=Path(sys.argv[1]))
print(run.run_id, run.attempt)
"""


AGENT = """
import os, subprocess, sys
for rank in "01":
    print(subprocess.check_output([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": rank}, text=True).strip())
"""


def _launch(tmp_path: Path, environ: dict[str, str]) -> set[str]:
    """One launcher process with two ranks; what each says of its run."""
    output = subprocess.check_output([sys.executable, "-c", AGENT, "-c", SCRIPT, str(tmp_path)], env={"PATH": "/usr/bin", **environ}, text=True)
    return set(output.split("\n")[:-1])


def test_the_ranks_of_one_torchrun_share_a_run_and_two_torchruns_do_not(tmp_path: Path) -> None:
    one, other = _launch(tmp_path, _torchrun()), _launch(tmp_path, _torchrun())
    assert (len(one), len(other)) == (1, 1)
    assert one != other


def test_a_restart_is_a_later_attempt_of_the_run(tmp_path: Path) -> None:
    member, facts = Member("trainer", 0, 0, 2), process_facts()
    first = resolve_run("r", member, _torchrun(), facts, launches_dir=tmp_path)
    again = resolve_run("r", member, _torchrun(TORCHELASTIC_RESTART_COUNT="1"), facts, launches_dir=tmp_path)
    assert (first.run_id, again.run_id) == ("r", "r")
    assert again.attempt == first.attempt + 1


def test_ranks_on_several_nodes_with_nothing_to_agree_with_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    member = Member("trainer", 0, 0, 16)
    environ = _torchrun(WORLD_SIZE="16")
    assert resolve_run(None, member, environ, process_facts()).attempt == 0
    assert "OTEL_FORGE_RUN_ID" in caplog.text


def test_a_slurm_step_has_an_id_of_its_own() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "16"}
    assert resolve_run(None, Member("trainer", 0, 0, 16), environ, process_facts()).run_id == "slurm-7.1"


@pytest.mark.parametrize(("given", "expected"), [("a/b c", "a-b-c"), ("..", "run"), ("x" * 300, "x" * 120), ("ok_1.2-3", "ok_1.2-3")])
def test_run_ids_fit_every_place(given: str, expected: str) -> None:
    assert clean_id(given) == expected


def test_spawned_processes_agree_through_the_group_s_store(tmp_path: Path) -> None:
    """mp.spawn with init_process_group: RANK is not set; rank 0's word travels by the store, without a collective."""
    script = tmp_path / "spawn.py"
    script.write_text(
        """
import os, sys
import torch.distributed as dist, torch.multiprocessing as mp
from otel_forge.identity import *
def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=2)
    member = resolve_member(None, 0, None, None, os.environ)
    run = resolve_run(None, member, os.environ, process_facts())
    dist.barrier()
    os.write(1, f"{member.rank} {member.world_size} {run.run_id} {run.attempt}\\n".encode())  # one write, which the other's cannot split
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
"""
    )
    lines = subprocess.check_output([sys.executable, str(script), str(tmp_path)], text=True, stderr=subprocess.DEVNULL).split("\n")[:-1]
    words = sorted(line.split() for line in lines)
    assert [item[:2] for item in words] == [["0", "2"], ["1", "2"]]
    assert words[0][2:] == words[1][2:]

"""What children record arrives once in the member's step, however they were started; and nobody hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing, os, sys
import otel_forge
from otel_forge import Reduce, record_metric

def work(number):
    with otel_forge.span("child/outer"), otel_forge.trace("child", metrics_only=False):
        pass
    for _ in range(100):
        record_metric("child", float(number), Reduce.SUM)
        record_metric("shared", 1.0, weight=2.0)

def main():
    method = sys.argv[1]
    otel_forge.init({"collector": {"shape": "inprocess"}, "metric_logging": {"jsonl": {"path": "rows.jsonl"}}})
    got = []
    otel_forge.pipeline.current()._worker._encode_spans = lambda records, *_: (got.extend(records), b"")[1]
    record_metric("shared", 4.0)
    otel_forge.set_step(3)
    context = multiprocessing.get_context(method)
    children = [context.Process(target=work, args=(number,)) for number in range(1, 4)]
    for child in children: child.start()
    for child in children: child.join(30); assert child.exitcode == 0, child.exitcode
    otel_forge.flush(3)
    otel_forge.shutdown()
    names = {span.span_id: span.name for span in got}
    print(sorted((span.name, names.get(span.parent_id), span.step) for span in got))

if __name__ == "__main__":
    main()
"""


def _run(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "script.py", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_values_of_multiprocessing_children_are_in_the_member_s_row(method: str, tmp_path: Path) -> None:
    done = _run(tmp_path, SCRIPT, method)
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert row["metrics"]["child"] == 100 * (1 + 2 + 3)
    assert row["metrics"]["shared"] == pytest.approx((4.0 + 2.0 * 300) / (1 + 2 * 300))
    assert row["world_size"] == 1
    assert done.stdout.strip() == str([("child", "child/outer", 3)] * 3 + [("child/outer", None, 3)] * 3)


LOADER = """
import torch
import otel_forge
from otel_forge import Reduce, record_metric

class Items(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        record_metric("data/items", 1, Reduce.SUM)
        return index

if __name__ == "__main__":
    otel_forge.init({"collector": {"shape": "inprocess"}, "metric_logging": {"jsonl": {"path": "rows.jsonl"}}})
    assert len(list(torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2))) == 10
    otel_forge.flush(0)
    otel_forge.shutdown()
"""


def test_what_dataloader_workers_record_arrives(tmp_path: Path) -> None:
    done = _run(tmp_path, LOADER)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum(row["metrics"].get("data/items", 0.0) for row in rows) == 40


FORKS = """
import os
import otel_forge
from otel_forge import Reduce, record_metric
otel_forge.init({"collector": {"shape": "inprocess"}, "metric_logging": {"jsonl": {"path": "rows.jsonl"}}})
for step in range(100):
    record_metric("n", 1.0, Reduce.SUM)
    child = os.fork()
    if child == 0:
        os._exit(0)
    otel_forge.flush(step)
    assert os.waitpid(child, 0)[1] == 0
otel_forge.shutdown()
"""


def test_a_hundred_forks_while_flushing_neither_hang_nor_double(tmp_path: Path) -> None:
    done = _run(tmp_path, FORKS)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["step"], row["metrics"]["n"]) for row in rows] == [(step, 1.0) for step in range(100)]


ORPHAN = """
import os, time
import otel_forge
otel_forge.init({"collector": {"shape": "inprocess"}, "metric_logging": {"jsonl": {"path": "rows.jsonl"}}})
reading, writing = os.pipe()
if os.fork() == 0:
    os.read(reading, 1)
    otel_forge.record_metric("late", 1.0)
    time.sleep(0.5)
    os._exit(0)
otel_forge.shutdown()
os.write(writing, b"x")
os.wait()
"""


def test_a_child_whose_parent_is_gone_says_that_its_values_are_lost(tmp_path: Path) -> None:
    done = _run(tmp_path, ORPHAN)
    assert done.returncode == 0, done.stderr
    assert "cannot reach its parent and is lost" in done.stderr

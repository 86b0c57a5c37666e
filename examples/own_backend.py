"""A backend of one's own: torchforge's interface, a CSV file per run or per rank.

    python examples/own_backend.py                 # reduced over all ranks: one file
    python examples/own_backend.py per_rank_reduce # a file for each rank

In a configuration file the same is `metric_logging: {csv: {class: "own_backend:CsvBackend", folder: csv}}`.
"""

import csv
import sys
from pathlib import Path

import otel_forge
from otel_forge import Reduce, record_metric


class CsvBackend:
    """Called in the exporter, from one thread. A method may be `async`; one that raises is called again later with the same step."""

    def __init__(self, logger_backend_config: dict) -> None:
        self.folder = Path(logger_backend_config.get("folder", "csv"))

    def init(self, role, primary_logger_metadata=None, process_name=None) -> None:
        self.folder.mkdir(exist_ok=True)
        self.file = open(self.folder / f"{process_name or role.value}.csv", "a", newline="")
        self.writer = csv.writer(self.file)

    def log_batch(self, metrics, global_step, *args, **kwargs) -> None:
        self.writer.writerows((global_step, metric.key, metric.value) for metric in metrics if not metric.key.startswith("forge/"))
        self.file.flush()

    def log_stream(self, metric, global_step, *args, **kwargs) -> None:
        self.log_batch([metric], global_step)

    def finish(self) -> None:
        self.file.close()


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else "global_reduce"
    backend = {"class": "own_backend:CsvBackend", "logging_mode": mode, "folder": "csv"}
    otel_forge.init({"collector": {"shape": "inprocess"}, "metric_logging": {"csv": backend}})
    for step in range(5):
        with otel_forge.step(step):
            record_metric("loss", 1.0 / (step + 1))
            record_metric("tokens", 512, Reduce.SUM)
    otel_forge.shutdown()
    for path in sorted(Path("csv").iterdir()):
        print(f"{path}:\n{path.read_text()}")


if __name__ == "__main__":
    main()

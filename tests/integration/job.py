"""A job without torch: each rank records seeded values that the test can compute too. One process is one rank."""

from __future__ import annotations

import argparse
import random
import time

import otel_forge
from otel_forge import Reduce, Tracer, record_metric


def values(rank: int, step: int) -> dict[str, list[float]]:
    """What a rank records in a step; ranks hold different numbers of values."""
    source = random.Random(f"{rank}/{step}")
    count = 1 + (rank + step) % 4
    return {name: [source.uniform(-5, 5) for _ in range(count)] for name in ("loss", "tokens", "peak", "low", "spread")}


REDUCTIONS = {"loss": Reduce.MEAN, "tokens": Reduce.SUM, "peak": Reduce.MAX, "low": Reduce.MIN, "spread": Reduce.STD}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interval", type=float, default=0.02)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--shape", default="auto")
    parser.add_argument("--crash-at", type=int)
    args = parser.parse_args()
    config = {"collector": {"shape": args.shape}, "metric_logging": {"jsonl": {"path": "rows.jsonl"}}} if args.shape == "inprocess" else None
    otel_forge.init(config, rank=args.rank, world_size=args.world_size, run_config={"steps": args.steps})
    rank = args.rank or 0
    for step in range(args.steps):
        if step == args.crash_at:
            raise RuntimeError(f"crashed at step {step}")
        with otel_forge.step(step):
            tracer = Tracer("job")
            tracer.start()
            for name, items in values(rank, step).items():
                for item in items:
                    record_metric(name, item, REDUCTIONS[name])
            tracer.stop("record")
        time.sleep(args.interval)
    print(otel_forge.shutdown(timeout_s=20.0))  # noqa: T201 - a test that fails shows it


if __name__ == "__main__":
    main()

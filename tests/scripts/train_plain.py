"""Train a small network on numbers: the usual script, written for nobody's telemetry. With torchrun on several ranks, or alone."""

import argparse
import os
import pickle
from dataclasses import dataclass

import torch
import torch.distributed as dist
from plain_model import Network, warm_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass(slots=True)
class Settings:
    steps: int
    accumulate: int = 1

    def describe(self) -> str:
        return f"{self.steps} steps"


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.load(index)

    def load(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(4, dtype=torch.float32) / 4 + index / self.size
        return x, x.sum().reshape(1)


class Trainer:
    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def train_step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = self.loss_of(batch) / len(batches)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.report(total)
        return total

    def report(self, loss: float) -> None:
        self.last_loss = loss

    def fit(self, loader: DataLoader) -> None:
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == self.settings.accumulate:
                self.train_step(batches)
                batches = []


def evaluate(trainer: Trainer) -> float:
    with torch.no_grad():
        return trainer.loss_of(Numbers(8)[3]).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--start-method")
    parser.add_argument("--out", default=".")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    settings = Settings(args.steps, args.accumulate)
    model: nn.Module = Network(4)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    data = Numbers(2 * args.steps * args.accumulate * world)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=args.workers, multiprocessing_context=args.start_method)
    warm_up(model)
    trainer = Trainer(model, settings)
    trainer.fit(loader)
    print(f"rank {rank}: {settings.describe()}, loss {evaluate(trainer):.4f}")
    if rank == 0:
        torch.save(model.state_dict(), os.path.join(args.out, "model.pt"))
        with open(os.path.join(args.out, "settings.pickle"), "wb") as file:
            pickle.dump((settings, Settings.describe, evaluate), file)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A loop of two classes' depth, for tests of steps that end by themselves."""

from __future__ import annotations

import torch
from torch import nn


class Loop:
    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, steps: int) -> None:
        for _ in range(steps):
            self.train_step()

    def train_step(self) -> None:
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()

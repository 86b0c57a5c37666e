"""What `train_plain.py` imports."""

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def warm_up(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(1, 4))

"""Train a small transformer language model with DDP, and watch it with otel-forge.

    otel-forge run -- torchrun --nproc_per_node 2 examples/train_ddp.py

The text is the source code of the running Python's standard library, read byte by byte, so nothing has to be downloaded.
"""

import argparse
import json
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import otel_forge
from otel_forge import Reduce, Tracer, instrument, record_metric


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.token(tokens) + self.position[: tokens.shape[1]]))


@instrument
class Corpus:
    """Sequences of bytes; each rank draws its own. `next_batch` is traced because its class is instrumented."""

    def __init__(self, rank: int, length: int, device: torch.device) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files[:60])
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length, self.device = length, device
        self.random = torch.Generator().manual_seed(1000 + rank)

    def next_batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.data) - self.length - 1, (size,), generator=self.random)
        rows = torch.stack([self.data[start : start + self.length + 1] for start in starts.tolist()]).long().to(self.device)
        return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=12, help="sequences a rank and step; rank r takes r more")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--config", help="otel-forge configuration file")
    parser.add_argument("--record-truth", type=Path, help="folder where each rank writes what it trained on, to check the rows by")
    parser.add_argument("--fail-at", type=int, help="raise at this step, to see what is kept of a run that crashes")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    otel_forge.init(args.config, run_config={key: value for key, value in vars(args).items() if key != "record_truth"})

    model = DistributedDataParallel(LanguageModel(args.width, args.layers, args.length).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    corpus = Corpus(rank, args.length, device)
    size = args.batch + rank  # ranks hold different numbers of samples: a mean of the ranks' means would be wrong
    truth: list[dict[str, object]] = []

    for step in range(args.steps):
        if step == args.fail_at:
            raise RuntimeError(f"asked to fail at step {step}")
        with otel_forge.step(step):
            tracer = Tracer("train")
            tracer.start()
            inputs, targets = corpus.next_batch(size)
            tracer.step("data")
            logits = model(inputs)
            losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)
            tracer.step("forward")
            optimizer.zero_grad(set_to_none=True)
            losses.mean().backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            tracer.step("backward")
            optimizer.step()
            tracer.stop("optimizer")

            record_metric("loss", losses, weight=targets.shape[1])  # each sample is a measurement, weighted by its tokens
            record_metric("tokens", targets.numel(), Reduce.SUM)
            record_metric("grad_norm", grad_norm, Reduce.MAX)
            record_metric("lr", schedule.get_last_lr()[0], Reduce.MIN)
            record_metric("sample_loss/std", losses, Reduce.STD)
            schedule.step()
        if args.record_truth:
            truth.append({"step": step, "losses": losses.tolist(), "tokens": targets.numel(), "grad_norm": float(grad_norm)})

    if args.record_truth:
        args.record_truth.mkdir(parents=True, exist_ok=True)
        (args.record_truth / f"rank{rank}.json").write_text(json.dumps(truth))
    if rank == 0:
        print(f"trained {args.steps} steps on {world} ranks, last loss {losses.mean().item():.3f}")
    otel_forge.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a character-level language model with several processes: the source code of Python's standard library, from nothing.

    python examples/train_lm.py

Two kinds of actors do the work, each in processes of its own:

* the `DataLoader` reads the text and hands out batches;
* each `Trainer` computes gradients on batches of its own; a collective operation averages them over all trainers, which all apply the same
  step, so that their weights stay equal to the last bit.

This program, which spawns them and asks for one step after another, is their controller.

The held-out loss begins near ln 96 ≈ 4.56 nats per character, which is guessing, and has to fall by at least 2.5 nats (with --quick: by
0.8); otherwise, or if the trainers' weights differ, the exit status is 1. That takes about a minute on two cores. The same seed and number
of trainers give the same losses. The loss curve is written to out/loss.svg.

A trainer that is lost costs a step and no more: it is started again in a new process and takes over the state of another one (where it is
the only one, that of its last checkpoint), and all do that step once more. With --kill-one the program kills one in mid-run, and ends with
the very losses of a run in which that did not happen.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

try:
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
except ImportError as missing:
    sys.exit(f"{missing.name} is not installed; in the project's folder: python3 -m pip install torch==2.13.0 -e '.[torch,examples]'")

from lm.curve import write_curve
from lm.model import CharTransformer, Config, learning_rate_at, next_character_loss
from lm.text import decode, encode, read_corpus

from monarch_async import Actor, ActorDied, Restart, current_rank, current_size, endpoint, this_host
from monarch_async.tensor import PeerLost, TensorActor

DEFAULT_STEPS = 600
HELD_OUT_BATCHES = 8
CHECKPOINT_EVERY = 25  # steps
PROMPT = "def "


class DataLoader(Actor):
    """Reads and encodes the text once, then hands out batches."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.corpus = read_corpus(config.corpus)

    @endpoint
    async def describe(self) -> str:
        train, held_out = len(self.corpus.train), len(self.corpus.held_out)
        return f"{self.corpus.files} files of the standard library: {train:,} characters to train on, {held_out:,} held out"

    @endpoint
    async def train_batch(self, rank: int, step: int) -> torch.Tensor:
        """Drawn from rank and step, whoever asks first: so a run can be repeated."""
        seed = hash((self.config.seed, rank, step))
        return self.corpus.train_batch(self.config.rows, self.config.context + 1, seed)

    @endpoint
    async def held_out_batch(self, index: int) -> torch.Tensor:
        return self.corpus.held_out_batch(2 * self.config.rows, self.config.context + 1, index)


class Trainer(TensorActor):
    """Holds the model. Its endpoints are plain functions, so they run in a thread of the actor's own, where they may compute and wait.

    As a `TensorActor` it has `self.comm`, by which the trainers work together.
    """

    def __init__(self, config: Config, loader: DataLoader) -> None:
        torch.manual_seed(config.seed)  # the same weights everywhere
        self.config = config
        self.loader = loader
        self.model = CharTransformer(config)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.95), weight_decay=0.01)
        self.steps = 0

    def __checkpoint__(self) -> dict[str, Any]:
        return {"steps": self.steps, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def __restore__(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @endpoint
    def step(self, step: int) -> float:
        """Train on one batch together with the other trainers; the loss on this one's batch."""
        batch = self.loader.train_batch.call_one(current_rank().rank, step).get()
        self.optimizer.zero_grad()
        loss = next_character_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]

        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None])
        self.comm.all_reduce(gradient, "mean").get()  # now it is the same at all trainers
        parts = torch.split(gradient, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(step, self.config)
        self.optimizer.step()
        self.steps = step + 1
        return loss.item()

    @endpoint
    def save(self) -> None:
        self.checkpoint().get()

    @endpoint
    def steps_done(self) -> int:
        """Answers when all trainers are up."""
        self.comm.ready().get()
        return self.steps

    @endpoint
    def state(self) -> dict[str, Any]:
        return self.__checkpoint__()

    @endpoint
    def adopt(self, state: dict[str, Any]) -> None:
        self.__restore__(state)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def held_out_losses(self) -> list[float]:
        """The loss on each of this trainer's share of the held-out batches."""
        share = range(current_rank().rank, HELD_OUT_BATCHES, current_size()["trainers"])
        batches = [self.loader.held_out_batch.call_one(index) for index in share]
        with torch.no_grad():
            return [next_character_loss(self.model, batch.get()).item() for batch in batches]

    @endpoint
    def digest_of_weights(self) -> str:
        """Equal only where every bit of every weight is."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()

    @endpoint
    def write(self, prompt: str, length: int) -> str:
        """`prompt` and how the model would go on."""
        ids = self.model.continue_text(encode(prompt).long(), length, temperature=0.7, seed=self.config.seed)
        return decode(ids)


async def bring_together(trainers: Trainer) -> int:
    """After a trainer was lost: wait until it is up again, and see to it that all go on from the same step; returns that."""
    done = await trainers.steps_done.call()
    latest = max(done.values())
    ahead, behind = ([point.rank for point, steps in done.items() if (steps == latest) is there] for there in (True, False))
    if behind:
        state = await trainers.slice(trainers=ahead[0]).state.call_one()
        for rank in behind:
            await trainers.slice(trainers=rank).adopt.call_one(state)
    return latest


async def train(config: Config, trainer_count: int, fall_wanted: float, out: Path, kill_one: bool) -> bool:
    """Spawn the actors, train, report; whether all went as it should."""
    began = time.monotonic()
    host = this_host()
    one_thread = {"OMP_NUM_THREADS": "1"}  # one core for each trainer
    loader_proc = host.spawn_procs(name="loader", preload=["torch"], env=one_thread)
    trainer_procs = host.spawn_procs({"trainers": trainer_count}, name="trainers", preload=["torch", "torch.distributed"], env=one_thread)

    loader = loader_proc.spawn("loader", DataLoader, config)
    trainers = trainer_procs.spawn("trainers", Trainer, config, loader, restart=Restart(max_restarts=3, within=60.0))
    await trainers
    print(await loader.describe.call_one())
    print(f"{trainer_count} trainers are up after {time.monotonic() - began:.1f} s")

    async def held_out_loss() -> float:
        losses = list(chain.from_iterable((await trainers.held_out_losses.call()).values()))
        return sum(losses) / len(losses)

    victim = await trainers.slice(trainers=trainer_count - 1).pid.call_one()
    train_curve: list[tuple[float, float]] = []
    held_out_curve = [(0.0, await held_out_loss())]
    tokens_a_step = trainer_count * config.rows * config.context
    look_every = max(1, config.steps // 12)
    with progress_bar() as bar:
        task = bar.add_task("training", total=config.steps, loss=held_out_curve[0][1], held_out=held_out_curve[0][1], speed=0.0)
        began = time.monotonic()
        step = 0
        while step < config.steps:
            answers = trainers.step.call(step)
            if kill_one and step == config.steps // 2:
                kill_one = False
                os.kill(victim, signal.SIGKILL)
            try:
                losses = list((await answers).values())
                step += 1
                if step % look_every == 0 or step == config.steps:
                    held_out_curve.append((step, await held_out_loss()))
                if step % CHECKPOINT_EVERY == 0:
                    await trainers.save.call()
            except (ActorDied, PeerLost) as lost:
                step = await bring_together(trainers)
                bar.console.print(f"{lost.mesh}[{lost.rank}] was lost ({lost.reason}); all go on from step {step}")
                train_curve = train_curve[:step]
                held_out_curve = [(at, loss) for at, loss in held_out_curve if at <= step]
                continue
            train_curve.append((step, sum(losses) / len(losses)))
            speed = tokens_a_step * step / (time.monotonic() - began)
            bar.update(task, completed=step, loss=train_curve[-1][1], held_out=held_out_curve[-1][1], speed=speed)
    took = time.monotonic() - began

    digests = set((await trainers.digest_of_weights.call()).values())
    sample = await trainers.slice(trainers=0).write.call_one(PROMPT, 240)
    first, last = held_out_curve[0][1], held_out_curve[-1][1]
    write_curve(out, f"Held-out loss {first:.2f} → {last:.2f} in {took:.0f} s on {trainer_count} trainers", train_curve, held_out_curve)

    print(f"\n{sample}\n")
    print(f"held-out loss: {first:.3f} → {last:.3f} nats per character after {config.steps} steps in {took:.1f} s")
    print(f"weights: {'equal on all trainers' if len(digests) == 1 else 'DIFFERENT'}")
    print(f"loss curve: {out}")
    if first - last < fall_wanted:
        print(f"FAILED: the held-out loss was to fall by {fall_wanted} nats, and fell by {first - last:.3f}")
    return len(digests) == 1 and first - last >= fall_wanted


def progress_bar() -> Progress:
    loss = TextColumn("loss {task.fields[loss]:.3f}, held out {task.fields[held_out]:.3f}")
    speed = TextColumn("{task.fields[speed]:,.0f} tokens/s")
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss, speed, TimeRemainingColumn())


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


at_least_one.__name__ = "number (1 or more)"  # as argparse names it in its error


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a character-level language model on Python's standard library.")
    parser.add_argument("--steps", type=at_least_one, help=f"optimizer steps (default: {DEFAULT_STEPS})")
    parser.add_argument("--trainers", type=at_least_one, default=2, help="processes that train (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="decides weights, batches and sample (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out/loss.svg"), help="where the loss curve goes (default: out/loss.svg)")
    parser.add_argument("--kill-one", action="store_true", help="kill a trainer in mid-run")
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few seconds")
    options = parser.parse_args()
    if options.quick:
        small = {"corpus": 400_000, "width": 32, "depth": 1, "heads": 2, "context": 48, "rows": 8}
        config = Config(options.steps or 60, options.seed, learning_rate=1e-2, **small)
    else:
        config = Config(options.steps or DEFAULT_STEPS, options.seed)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.touch()
    except OSError as error:
        parser.error(f"--out can't be written: {error}")
    try:
        good = asyncio.run(train(config, options.trainers, 0.8 if options.quick else 2.5, options.out, options.kill_one))
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Weights that flow from a trainer to those who use them, while all of them go on working: the shape of RL post-training.

    python examples/weight_sync.py

A `Trainer` learns the source code of Python's standard library, character by character, and publishes its weights every few steps. Four
`Generator`s write text with the newest weights that they have: after each piece of text they pull those of a newer version, if there is
one, into their own model. Nobody waits for anybody: the trainer copies its weights into shared memory and trains on; the generators read
them from there by themselves.

Each version carries a checksum, made by the trainer. A generator computes it again from what it has pulled: were one version mixed with
another, it would show. The exit status is 1 if that happens, or if the loss does not fall.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from typing import NamedTuple

try:
    import torch
except ImportError as missing:
    sys.exit(f"{missing.name} is not installed; in the project's folder: python3 -m pip install torch==2.13.0 -e '.[torch,examples]'")

from lm.model import CharTransformer, Config, next_character_loss
from lm.text import decode, encode, read_corpus

from monarch_async import Actor, concurrent_endpoint, current_rank, endpoint, this_host
from monarch_async.tensor import Published, StateDict

PROMPT = "def "
CHECKSUM = "checksum"


def digest_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """32 bytes that change with any bit of the weights."""
    digest = hashlib.sha256()
    for key in sorted(weights.keys() - {CHECKSUM}):
        digest.update(weights[key].numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


class Trainer(Actor):
    """Trains in its own thread, so that its process goes on answering, and publishes every few steps."""

    published: Published

    def __init__(self, config: Config, every: int) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.every = every
        self.corpus = read_corpus(config.corpus)
        self.model = CharTransformer(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        self.publishing = 0.0  # seconds

    def weights(self) -> dict[str, torch.Tensor]:
        weights = self.model.state_dict()
        return {**weights, CHECKSUM: digest_of(weights)}

    @endpoint
    def publish(self) -> StateDict:
        self.published = StateDict.publish(self.weights(), name="policy").get()
        return self.published

    @endpoint
    def train(self) -> tuple[float, float, int, float]:
        """First and last loss, how many versions were published, and the seconds that took."""
        losses = []
        for step in range(self.config.steps):
            batch = self.corpus.train_batch(self.config.rows, self.config.context + 1, step)
            self.optimizer.zero_grad()
            loss = next_character_loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            losses.append(loss.item())
            if (step + 1) % self.every == 0:
                weights = self.weights()
                began = time.perf_counter()
                self.published.update(weights).get()
                self.publishing += time.perf_counter() - began
        return losses[0], losses[-1], self.config.steps // self.every, self.publishing


class Report(NamedTuple):
    """What one generator has to tell."""

    pulls: int
    torn: int
    seconds: float  # spent pulling
    staleness: float  # versions that the weights in use were behind, on average over the pieces of text
    pieces: int
    text: str


class Generator(Actor):
    """Writes text until it is told to finish, with weights that are as new as can be had."""

    def __init__(self, config: Config, handle: StateDict) -> None:
        self.model = CharTransformer(config)
        self.weights = {**self.model.state_dict(), CHECKSUM: torch.zeros(32, dtype=torch.uint8)}
        self.handle = handle
        self.finished = False

    @concurrent_endpoint
    async def finish(self) -> None:
        self.finished = True

    @concurrent_endpoint
    async def run(self) -> Report:
        rank = current_rank().rank
        version = pulls = torn = pieces = behind = 0
        pulling, text = 0.0, ""
        while not self.finished:
            newest = await self.handle.version()
            if newest > version:
                began = time.perf_counter()
                version = await self.handle.pull_into(self.weights)
                pulling += time.perf_counter() - began
                pulls += 1
                torn += not torch.equal(self.weights[CHECKSUM], digest_of(self.weights))
            ids = await asyncio.to_thread(self.model.continue_text, encode(PROMPT).long(), 24, 0.7, 1000 * rank + pieces)
            text = decode(ids)
            pieces += 1
            behind += await self.handle.version() - version
        return Report(pulls, torn, pulling, behind / pieces, pieces, text)


async def run(config: Config, every: int, count: int) -> bool:
    """Spawn the actors, let them work, report; whether all went as it should."""
    host = this_host()
    one_thread = {"OMP_NUM_THREADS": "1"}
    trainer_proc = host.spawn_procs(name="trainer", preload=["torch"], env=one_thread)
    generator_procs = host.spawn_procs({"generators": count}, name="generators", preload=["torch"], env=one_thread)
    trainer = trainer_proc.spawn("trainer", Trainer, config, every)
    handle = await trainer.publish.call_one()
    generators = generator_procs.spawn("generators", Generator, config, handle)
    await generators

    began = time.perf_counter()
    running = generators.run.call()
    first, last, versions, publishing = await trainer.train.call_one()
    took = time.perf_counter() - began
    await generators.finish.call()
    reports = list((await running).values())

    size = sum(tensor.numel() * tensor.element_size() for tensor in (await handle.pull()).values())
    pulls, torn, pieces = (sum(getattr(report, name) for report in reports) for name in ("pulls", "torn", "pieces"))
    seconds = sum(report.seconds for report in reports)
    print(f"trained {config.steps} steps in {took:.1f} s, loss {first:.2f} → {last:.2f} nats per character")
    print(
        f"published {versions} versions of {size / 1e6:.1f} MB: {versions / took:.1f} a second, {1e3 * publishing / versions:.1f} ms each"
    )
    print(f"{count} generators pulled {pulls} times: {1e3 * seconds / pulls:.1f} ms each, {pulls * size / took / 1e6:.1f} MB/s in all")
    print(f"staleness: {sum(report.staleness for report in reports) / count:.2f} versions; pieces of text written: {pieces}")
    print(f"torn versions: {torn}")
    print(f"\n{reports[0].text}")
    return torn == 0 and last < first


def main() -> int:
    parser = argparse.ArgumentParser(description="Weights from a trainer to generators, while all go on working.")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default: 120)")
    parser.add_argument("--every", type=int, default=4, help="steps between versions (default: 4)")
    parser.add_argument("--generators", type=int, default=4, help="processes that generate (default: 4)")
    parser.add_argument("--width", type=int, default=64, help="of the model (default: 64)")
    options = parser.parse_args()
    if min(options.steps, options.every, options.generators) < 1 or options.every > options.steps or options.width % 2:
        parser.error("--steps, --every and --generators are at least 1, --every is at most --steps, and --width is even")
    config = Config(options.steps, corpus=400_000, width=options.width, depth=2, heads=2, context=48, rows=8, learning_rate=3e-3)
    return 0 if asyncio.run(run(config, options.every, options.generators)) else 1


if __name__ == "__main__":
    sys.exit(main())

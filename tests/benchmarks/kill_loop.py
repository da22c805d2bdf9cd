"""A training job whose ranks are killed again and again loses nothing that was saved, and ends as if undisturbed.

python -m tests.benchmarks.kill_loop --kills 50       # a few minutes on two cores
python -m tests.benchmarks.kill_loop --kills 4 --seed 1

Two gloo ranks train ``examples/production.py`` with a checkpoint every few steps. SIGKILL takes one of them or both, at
a random moment or while a checkpoint is written. Then: the survivor ends by itself; every checkpoint is whole, byte by
byte; none that was there is missing, but for those beyond ``--keep``. The same command goes on. When a job is done, its
validation losses and parameters are those of the undisturbed one, bitwise, and the next one begins.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import runpy
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import functorch_shard as fs
from tests.benchmarks.tools import command_line

EXAMPLE = Path(__file__).parents[2] / "examples" / "production.py"
RANKS, EPOCHS, EVERY, KEEP = 2, 3, 3, 3
TEXT, TRAINED = 3004, 41  # bytes, of which 41 windows are trained on and 5 validate: two ranks divide neither
OF_EPOCH = range(EVERY, -(-TRAINED // RANKS) + 1, EVERY)  # batches after which there is a checkpoint
SAVED = [name for i in range(EPOCHS) for name in (*(f"{i:03d}-{batch:04d}" for batch in OF_EPOCH), f"{i + 1:03d}-0000")]
LONGEST = 4.0  # seconds from the start to a kill at any moment
DURING = 0.1  # seconds from the beginning of a save to a kill; it takes about as long
PATIENCE = 30.0  # seconds until gloo gives up waiting; a survivor gets as long again


def one_rank(rank: int, life: Path, arguments: Sequence[str]) -> None:
    """The example as torchrun would start it; what it prints goes to a file."""
    output = os.open(life / f"rank-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), GLOO_SOCKET_IFNAME="lo")
    store = dist.FileStore(str(life / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE))
    sys.argv = [str(EXAMPLE), *arguments]
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when."""

    victims: Sequence[int]
    save: int  # in which save from the start; 0: at any moment
    after: float  # seconds

    @staticmethod
    def drawn(seed: int) -> Iterator[Kill]:
        rng = random.Random(seed)
        while True:
            victims, save = rng.choice([[0], [1], [0, 1]]), rng.choice([0, 0, 1, 2, 3])
            yield Kill(victims, save, rng.uniform(0, DURING if save else LONGEST))


@dataclass(frozen=True)
class Checkpoints:
    """The directory that a job saves to."""

    folder: Path

    def complete(self) -> list[str]:
        return sorted(name for name in self._names() if not name.startswith(".") and name != "best")

    def newest(self) -> str:
        return max(self.complete(), default="")

    def staging(self, since: float) -> list[str]:
        """Those that somebody has been writing since then; older ones are of the dead."""
        return [name for name in self._names() if name.endswith(".staging") and self._changed(name) > since]

    def check(self, before: str) -> None:
        """Raise unless all are whole and none is missing; ``before`` is the newest that was seen earlier."""
        names, newest = self.complete(), fs.checkpoint.latest(self.folder)
        assert newest == fs.checkpoint.latest(self.folder, verify=True)
        assert newest == (self.folder / self.newest() if names else None)
        assert self.newest() >= before, f"{names}: {before} was there"
        saved = SAVED[: SAVED.index(names[-1]) + 1] if names else []
        # Between publishing one and removing the oldest there is one more; who is killed there leaves it.
        assert names in (saved[-KEEP:], saved[-KEEP - 1 :]), f"{names} of {saved}"
        best = fs.checkpoint.latest(self.folder / "best")
        damaged = {path: fs.checkpoint.verify(path) for path in [*map(self.folder.joinpath, names), best] if path}
        assert not any(damaged.values()), damaged

    def _names(self) -> list[str]:
        return os.listdir(self.folder) if self.folder.exists() else []

    def _changed(self, name: str) -> float:
        path = self.folder / name
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # published meanwhile
            return 0.0


@dataclass(frozen=True)
class Life:
    """How one start of a job ended."""

    killed: int  # ranks that the kill took; 0: it came too late
    moment: str
    newest: str  # checkpoint just before the kill
    seconds: float  # from the kill to the end of the last rank
    output: str  # of rank 0


def live(folder: Path, number: int, kill: Kill | None) -> Life:
    """Start a job, or start it again, kill ranks, and wait until all have ended."""
    life, checkpoints = folder / f"life-{number}", Checkpoints(folder / "checkpoints")
    life.mkdir(parents=True)
    before = checkpoints.newest()
    text = folder / "text"
    text.write_bytes(EXAMPLE.read_bytes()[:TEXT])
    options = f"--epochs {EPOCHS} --patience 9 --batch-size 1 --dropout 0.1 --every {EVERY} --keep {KEEP}".split()
    arguments = [*options, "--text", str(text), "--checkpoint", str(checkpoints.folder)]
    context = multiprocessing.get_context("forkserver")  # it has torch loaded: a start takes a tenth of a second
    context.set_forkserver_preload(["functorch_shard"])
    ranks = [context.Process(target=one_rank, args=(rank, life, arguments)) for rank in range(RANKS)]
    start = time.time()
    try:
        for process in ranks:
            process.start()
        due = kill is not None and wait_for(kill, checkpoints, ranks, start)
        moment, newest = moment_of(checkpoints, start, before), checkpoints.newest()
        for victim in kill.victims if kill and due else ():
            ranks[victim].kill()
        seconds = wait_until_all_end(ranks, life, None if not due else 2 * PATIENCE)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    killed = [process.exitcode for process in ranks].count(-signal.SIGKILL)
    return Life(killed, moment, newest, seconds, output_of(life, 0))


def wait_for(kill: Kill, checkpoints: Checkpoints, ranks: Sequence[Any], start: float) -> bool:
    """Wait for the moment of the kill; False if all ranks end before it."""
    saves: set[str] = set()
    while len(saves) < kill.save:
        if not any(process.is_alive() for process in ranks):
            return False
        saves.update(checkpoints.staging(since=start))
        time.sleep(0.001)
    time.sleep(kill.after)
    return any(process.is_alive() for process in ranks)


def moment_of(checkpoints: Checkpoints, start: float, before: str) -> str:
    if checkpoints.staging(since=start):
        return "in a save"
    return "between saves" if checkpoints.newest() > before else "before the first save"


def wait_until_all_end(ranks: Sequence[Any], life: Path, patience: float | None) -> float:
    """By themselves; the seconds that it took. Without a kill, without an error."""
    start = time.monotonic()
    for rank, process in enumerate(ranks):
        process.join(patience or 300)
        assert process.exitcode is not None, f"rank {rank} hangs:\n{output_of(life, rank)}"
    codes = [process.exitcode for process in ranks]
    assert -signal.SIGKILL in codes or codes == [0] * RANKS, f"{codes}:\n{output_of(life, 0)}\n{output_of(life, 1)}"
    return time.monotonic() - start


def output_of(life: Path, rank: int) -> str:
    file = life / f"rank-{rank}"
    return file.read_text() if file.exists() else ""


def run_job(folder: Path, kills: Iterator[Kill]) -> Iterator[Life]:
    """Every life of a job until it is done; without any more kills, to its end."""
    newest = ""
    for number in itertools.count():
        life = live(folder, number, next(kills, None))
        Checkpoints(folder / "checkpoints").check(max(newest, life.newest))
        newest = Checkpoints(folder / "checkpoints").newest()
        yield life
        if not life.killed:
            return


def results(life: Life, checkpoints: Checkpoints) -> tuple[str, str]:
    """Validation losses of all epochs, with 12 digits, and the digest of the last checkpoint."""
    [losses] = [line for line in life.output.splitlines() if line.startswith("validation losses: ")]
    return losses, fs.checkpoint.digest(checkpoints.folder / SAVED[-1])


def kill_loop(num_kills: int, seed: int, folder: Path) -> list[Life]:
    """The lives that were ended; raises where anything was lost."""
    calm = folder / "undisturbed"
    [undisturbed] = run_job(calm, iter(()))
    expected = results(undisturbed, Checkpoints(calm / "checkpoints"))
    kills, ended = Kill.drawn(seed), []
    for job in itertools.count():
        left = itertools.takewhile(lambda _: len(ended) < num_kills, kills)
        life, own = None, folder / f"job-{job}"
        for life in run_job(own, left):
            if life.killed:
                ended.append(life)
                show(life, job, len(ended))
        assert life is not None
        found = results(life, Checkpoints(own / "checkpoints"))
        assert found == expected, f"job {job}: {found}, expected {expected}"
        print(f"job {job}: done, as the undisturbed one", flush=True)
        if len(ended) >= num_kills:
            return ended
    raise AssertionError("unreachable")


def show(life: Life, job: int, number: int) -> None:
    whom = "one rank" if life.killed == 1 else "all ranks"
    step = f"after {life.newest} was saved" if life.newest else "before any was saved"
    print(f"kill {number:3d}: job {job}, {whom} {life.moment}, {step}; {life.seconds:.2f} s to the end", flush=True)


def main() -> None:
    chosen = command_line(__doc__, kills=50, seed=0)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_loop_") as folder:
        ended = kill_loop(chosen.kills, chosen.seed, Path(folder))
    alone = [life.seconds for life in ended if life.killed == 1]
    print(f"{len(ended)} kills in {time.monotonic() - start:.0f} s: {dict(Counter(life.moment for life in ended))}")
    print("no checkpoint damaged, none lost; losses and parameters bitwise those of the undisturbed job")
    if alone:
        print(
            f"{len(alone)} survivors ended by themselves: {statistics.median(alone):.2f} s, at most {max(alone):.2f} s"
        )


if __name__ == "__main__":
    main()

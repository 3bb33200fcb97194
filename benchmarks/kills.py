"""Does a run that is killed at random moments end with the numbers of an undisturbed one?

    python benchmarks/kills.py --kills 200 --json record/kills.json
    python benchmarks/kills.py --slurm 40 --json record/slurm.json      where sbatch is installed

Half of the kills hit runs of one process, half runs of two processes, where the victim is a worker or the process that
launched both.  All processes are started afresh.  A killed run is resumed until it ends; then its rows (without the
clock), scores, parameters and optimiser state must be those of the undisturbed run, bit for bit.

`--slurm N` trains four runs as jobs of a real Slurm and sends them N times the signal of a preemption.  Slurm
sends it, too, before the time limit of two minutes.  Each time the worker saves, and Slurm starts the job again.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

from safetensors.torch import load

import polyhead as ph
from polyhead.train.store.folder import CHECKPOINT, CONFIG, METRICS, is_claimed, read_config, read_metrics

CLOCK = ("seconds", "steps_per_second")
SEEDS = (0, 1, 2, 3)
NUM_LIVES = 60
"""After so many lives without an end, a run counts as lost."""


def small_run(folder: pathlib.Path, steps: int = 300) -> ph.Run:
    """A run with dropout, of some seconds, that saves every few steps."""
    task = ph.tasks.FuzzyLogic(length=8)
    model = ph.TransformerConfig(*task.ends, dim=16, layers=2, heads=(ph.Softmax(2), ph.Hyla(2)), dropout=0.1)
    train = ph.Train(steps=steps, batch_size=8, warmup=10, log_every=1, eval_every=20, save_every=7, eval_batches=1)
    return ph.Run(task=task, model=model, train=train, name="killed", device="cpu", threads=1, folder=str(folder))


def command(folder: pathlib.Path, num_processes: int) -> list[str]:
    if num_processes == 1:
        return [sys.executable, "-m", "polyhead.train", str(folder), "--quiet"]
    return [sys.executable, "-m", "polyhead", "resume", str(folder), "--devices", str(num_processes), "--quiet"]


def start(folder: pathlib.Path, num_processes: int) -> subprocess.Popen[bytes]:
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(command(folder, num_processes), stdout=log, stderr=log)


def children(parent: int) -> list[int]:
    """The processes that `parent` started."""
    numbers = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8")
    return [int(number) for number in numbers.split()]


def modified(path: pathlib.Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def live(folder: pathlib.Path, num_processes: int, delay: float, dice: random.Random) -> tuple[bool, int]:
    """Resume the run and kill a process; return whether that happened, and the exit code.

    Args:
        delay: Seconds after the run went on; a delay below 0 kills while the libraries are imported.
    """
    rows = folder / METRICS
    before = modified(rows)
    process = start(folder, num_processes)
    if delay < 0:
        time.sleep(-delay)
    else:
        while process.poll() is None and modified(rows) == before:
            time.sleep(0.002)
        time.sleep(delay)
    victims = [process.pid]
    if num_processes > 1 and process.poll() is None:
        victims += children(process.pid)
    is_killed = process.poll() is None
    if is_killed:
        os.kill(dice.choice(victims), signal.SIGKILL)
    code = process.wait()
    while is_claimed(folder):  # by the workers of a killed launcher, which save and stop
        time.sleep(0.05)
    return is_killed, code


def facts(folder: pathlib.Path) -> dict[str, object]:
    """What must be the same, bit for bit."""
    rows = []
    for row in read_metrics(folder):
        rows.append({name: value for name, value in row.items() if name not in CLOCK})
    result = ph.train.read_result(folder)
    assert result is not None
    tensors = load((folder / CHECKPOINT).read_bytes())
    values = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    return {"rows": rows, "scores": result.scores, "tensors": values}


# ---------------------------------------------------------------------------------------------------------------- Slurm
def preempted(root: pathlib.Path, num_signals: int, dice: random.Random) -> dict[str, int]:
    """Train `SEEDS` as jobs of Slurm, preempted at random moments; count the runs that differ from undisturbed ones."""
    configuration, sweep_folder = root / "run.json", root / "sweep"
    run = replace(small_run(root, steps=1500), folder=None)
    ph.config.save(run, configuration)
    seeds = ",".join(map(str, SEEDS))
    sweep = [sys.executable, "-m", "polyhead", "sweep", str(configuration), "--seed", seeds, "--folder"]
    process = subprocess.Popen([*sweep, str(sweep_folder), "--slurm", "--minutes", "2"])
    counts: dict[str, int] = {"runs": len(SEEDS)}
    signalled: set[str] = set()
    while process.poll() is None:
        time.sleep(dice.uniform(1, 5))
        folders = {read_config(path.parent).seed: path.parent for path in sweep_folder.glob(f"*/{CONFIG}")}
        # A line has a job and its start, such as "15_1 2026-11-29T16:52:56".  A start gets one signal, after submitit
        # has begun to listen.  The jobs are one array, in the order of the seeds.
        starts = output_of("squeue", "--noheader", "--states=running", "--name=polyhead", "--format=%i %S").splitlines()
        training = []
        for line in set(starts) - signalled:
            index = line.split()[0].rpartition("_")[2]
            if is_claimed(folders[SEEDS[int(index)]]):
                training.append(line)
        if training and len(signalled) < num_signals:
            line = dice.choice(sorted(training))
            signalled.add(line)
            # While the job is queued again, scancel would repeat itself and hit the next start.
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["scancel", "--signal=USR2", line.split()[0]], check=False, timeout=2)
    counts["signals"] = len(signalled)
    restarts = re.findall(r"JobName=polyhead .*?Restarts=(\d+)", output_of("scontrol", "show", "job", "--oneliner"))
    counts["restarts"] = sum(map(int, restarts))

    counts |= {"differ": 0, "lost": 0}
    finished = {read_config(path.parent).seed: path.parent for path in sweep_folder.glob("*/result.json")}
    for seed in SEEDS:
        undisturbed = root / f"undisturbed-{seed}"
        undisturbed.mkdir()
        ph.config.save(replace(run, seed=seed, folder=str(undisturbed)), undisturbed / CONFIG)
        if start(undisturbed, num_processes=1).wait():
            raise SystemExit((undisturbed / "log.txt").read_text(encoding="utf-8"))
        if seed not in finished:
            counts["lost"] += 1
        elif facts(finished[seed]) != facts(undisturbed):
            counts["differ"] += 1
    print(counts, flush=True)
    return counts


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--slurm", type=int, metavar="N", help="preempt jobs of Slurm N times instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="write the counts into this file")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    report = []
    with tempfile.TemporaryDirectory() as root:
        if options.slurm is not None:
            report.append(preempted(pathlib.Path(root), options.slurm, dice))
        for num_processes in (1, 2) if options.slurm is None else ():
            undisturbed = pathlib.Path(root, f"undisturbed-{num_processes}")
            undisturbed.mkdir()
            ph.config.save(small_run(undisturbed), undisturbed / CONFIG)
            if start(undisturbed, num_processes).wait():
                raise SystemExit((undisturbed / "log.txt").read_text(encoding="utf-8"))
            expected = facts(undisturbed)
            result = ph.train.read_result(undisturbed)
            assert result is not None
            counts = {"processes": num_processes, "kills": 0, "runs": 0, "differ": 0, "lost": 0}
            while counts["kills"] < options.kills // 2:
                folder = pathlib.Path(root, f"{num_processes}-{counts['runs']}")
                folder.mkdir()
                ph.config.save(small_run(folder), folder / CONFIG)
                counts["runs"] += 1
                for _ in range(NUM_LIVES):
                    delay = dice.uniform(0, result.seconds / 2)
                    if dice.random() < 0.1:
                        delay = -dice.uniform(0, 3)
                    is_killed, code = live(folder, num_processes, delay, dice)
                    counts["kills"] += is_killed
                    if code == 0:
                        break
                if not (folder / "result.json").exists():
                    counts["lost"] += 1
                    print((folder / "log.txt").read_text(encoding="utf-8"))
                elif facts(folder) != expected:
                    counts["differ"] += 1
                print(counts, flush=True)
            report.append(counts)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(counts["differ"] or counts["lost"] for counts in report))


if __name__ == "__main__":
    sys.exit(main())

"""Cases of faults: a run is hit, started again as its user would, and compared with one that nothing happened to.

    kills     one run hit several times in a row, then left alone
    damage    a run is stopped (or has finished), one of its files is damaged, and it is started again

A case gives a list of records, a fault each: what it was, its moment, what came of it.  `outcome` is one of

    unharmed      the life ended before the fault came
    went on       the next life went on, or began anew, by itself
    refused       one clear line that names the file or its folder, an exit code that is not 0, and mending it helps
    as written    config.json is valid and still the same run, but says otherwise what to log: it is done so
    told          rows of metrics.jsonl are lost, which one line says; scores and parameters are right
    unclear       it stopped, but not with such a line
    lost          it could not be brought to an end
    wrong         it came to an end that differs from that of the undisturbed run: in `detail`
"""

import contextlib
import pathlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from faults import DAMAGES, Order, Zygote, damage, difference, facts

import polyhead as ph
from polyhead.config import digest, save
from polyhead.train import read_config

GOOD = ("unharmed", "went on", "refused", "as written", "told")
SPARED = ("worker.log", ".lock", ".gitignore", "lock")
"""Files that nothing rests on."""

TRIES = 8
"""Lives without a fault after which a run counts as lost."""


def tiny(folder: pathlib.Path, name: str = "tiny", steps: int = 30, **fields: Any) -> ph.Run:
    """A run of a fraction of a second, with dropout, that saves every five steps."""
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.TransformerConfig(
        *task.ends, dim=8, layers=1, heads=(ph.Softmax(2), ph.Hyla(2)), max_length=6, dropout=0.1
    )
    train = ph.Train(
        steps=steps, batch_size=2, warmup=3, log_every=2, eval_every=10, save_every=5, eval_batches=1, lr=3e-3
    )
    given: dict[str, Any] = {"device": "cpu", "threads": 1, "folder": str(folder), **fields}
    return ph.Run(name=name, task=task, model=model, train=train, **given)


def corpus(root: pathlib.Path, count: int = 12) -> pathlib.Path:
    """A folder of documents, a few hundred bytes each."""
    place = root / "documents"
    place.mkdir(parents=True)
    for i in range(count):
        (place / f"{i:02}.py").write_text("".join(f"def f{i}_{j}(x):\n    return x + {i * j}\n" for j in range(8)))
    return place


class Scenario:
    """What is done, and how its end is looked at.  `fresh` makes a new one of the kind in a folder of its own."""

    name: str
    durations: tuple[float, float] = (0.0, 1.0)

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self.prepare()

    def prepare(self) -> None:
        raise NotImplementedError

    def order(self) -> Order:
        raise NotImplementedError

    def found(self) -> Order:
        """The facts at its end, by whatever names."""
        raise NotImplementedError

    def files(self) -> list[pathlib.Path]:
        """What may be damaged."""
        raise NotImplementedError

    def mend(self, path: pathlib.Path) -> None:
        """What a user does about a file that an error names: write the configuration again, or do without the file;
        without the checkpoint of a finished run it is trained again."""
        path.unlink(missing_ok=True)
        if path.name == "config.json":
            save(self.config_of(path.parent), path)
        if path.name == "checkpoint.safetensors":
            path.with_name("result.json").unlink(missing_ok=True)

    def user_of(self, path: pathlib.Path) -> pathlib.Path:
        """The run folder to which a file belongs."""
        return path.parent

    def config_of(self, folder: pathlib.Path) -> ph.Run:
        raise NotImplementedError

    def differs(self, wanted: Order) -> str | None:
        for name, value in wanted.items():
            came = self.found()[name]
            if (what := difference(came, value) if isinstance(value, dict) else None) or came != value:
                return f"{name}: {what or 'contents differ'}"
        return None


class OneRun(Scenario):
    name = "train"

    def prepare(self) -> None:
        self.folder = self.root / "run"
        self.config = self.made()
        self.folder.mkdir()
        save(self.config, self.folder / "config.json")

    def made(self) -> ph.Run:
        return tiny(self.folder)

    def order(self) -> Order:
        return {"do": "train", "root": str(self.root), "folder": str(self.folder)}

    def found(self) -> Order:
        return {"run": facts(self.folder)}

    def files(self) -> list[pathlib.Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_file() and path.name not in SPARED)

    def user_of(self, path: pathlib.Path) -> pathlib.Path:
        return self.folder

    def config_of(self, folder: pathlib.Path) -> ph.Run:
        return self.config


class TextRun(OneRun):
    """A run that tokenises its text first, with a tokenizer that it trains."""

    name = "text run"

    def made(self) -> ph.Run:
        task = ph.tasks.Text(
            str(corpus(self.root)), length=8, tokenizer="bpe:270", held_out=0.2, folder=str(self.root / "tokens")
        )
        model = ph.TransformerConfig(
            *task.ends, dim=8, layers=1, heads=(ph.Softmax(2),), max_length=8, causal=True, positions=ph.Rotary()
        )
        train = ph.Train(
            steps=20, batch_size=2, warmup=3, log_every=2, eval_every=10, save_every=5, eval_batches=1,
            evaluate=("validation",),
        )  # fmt: skip
        return ph.Run(
            name="text", task=task, model=model, train=train, device="cpu", threads=1, folder=str(self.folder)
        )

    def found(self) -> Order:
        # The folder of the corpus is another for every case, and so are the digests that it enters.
        run = {name: value for name, value in facts(self.folder).items() if name != "digest"}
        return {"run": run, "tokens": tokens(self.root / "tokens")}

    def files(self) -> list[pathlib.Path]:
        return [*super().files(), *sorted(path for path in (self.root / "tokens").rglob("*") if _is_token_file(path))]


class Tokens(Scenario):
    """Text as tokens on the disk, a line of the journal for each few documents."""

    name = "tokenise"

    def prepare(self) -> None:
        data = corpus(self.root, 30)
        self.task = {"data": str(data), "length": 8, "held_out": 0.2, "folder": str(self.root / "tokens")}
        self.task["tokenizer"] = "bpe:270"

    def order(self) -> Order:
        return {"do": "text", "root": str(self.root), "text": self.task, "stretch": 600}

    def found(self) -> Order:
        return {"tokens": tokens(self.root / "tokens")}

    def files(self) -> list[pathlib.Path]:
        return sorted(path for path in (self.root / "tokens").rglob("*") if _is_token_file(path))


def _is_token_file(path: pathlib.Path) -> bool:
    return path.is_file() and path.name not in SPARED


def tokens(folder: pathlib.Path) -> Order:
    """The token files, by what they hold: their names have a hash of where the documents lie."""
    found = {}
    for path in folder.rglob("*"):
        if _is_token_file(path) and path.name != "manifest.json":
            found[path.name.partition(".")[2]] = path.read_bytes().hex()
    return found


class Sweep(Scenario):
    """Three runs in two workers."""

    name, verb = "sweep", "sweep"

    def prepare(self) -> None:
        self.folder = self.root / "runs"
        self.runs = self.made()
        for run in self.runs:
            save(run, self.root / f"{run.name}.json")

    def made(self) -> list[ph.Run]:
        return [tiny(self.folder, f"seed{seed}", steps=20, seed=seed) for seed in range(3)]

    def order(self) -> Order:
        paths = [str(self.root / f"{run.name}.json") for run in self.runs]
        return {"do": self.verb, "root": str(self.folder), "folder": str(self.folder), "runs": paths}

    def places(self) -> dict[str, pathlib.Path]:
        return {run.name: self.folder / f"{run.name}-{digest(run)}" for run in self.runs}

    def config_of(self, folder: pathlib.Path) -> ph.Run:
        return next(run for run in self.runs if self.places()[run.name] == folder)

    def found(self) -> Order:
        return {name: facts(place) for name, place in self.places().items()}

    def files(self) -> list[pathlib.Path]:
        place = next(iter(self.places().values()))  # of one run: the others are like it
        return sorted(path for path in place.iterdir() if path.is_file() and path.name not in SPARED)


class Population(Sweep):
    """Three runs in one process.  Cut short between the checkpoints of its members, they go on in other company: their
    numbers are then the same to rounding."""

    name, verb = "population", "population"

    def differs(self, wanted: Order) -> str | None:
        import numpy as np

        for name, came in self.found().items():
            value = wanted[name]
            for part in ("rows", "scores", "tensors"):
                one, other = (_numbers(side[part]) for side in (came, value))
                if one.shape != other.shape or not np.allclose(one, other, rtol=2e-3, atol=2e-4):
                    return f"{name}: {difference(came, value)}"
        return None


def _numbers(value: Any) -> Any:
    """All numbers in rows, scores or tensors."""
    import numpy as np

    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return np.concatenate([_numbers(item).reshape(-1) for item in value] or [np.zeros(0)])
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return np.frombuffer(bytes.fromhex(value), np.float32)
        return np.zeros(0)
    return np.array([0.0 if value is None else float(value)])


KINDS = {kind.name: kind for kind in (OneRun, TextRun, Tokens, Sweep, Population)}


@dataclass(frozen=True)
class Undisturbed:
    """What a scenario comes to by itself: its facts, how long it takes, how many operations change its files."""

    facts: Order
    seconds: float
    points: int


class Campaign:
    """Cases in folders of their own under `root`."""

    def __init__(self, zygote: Zygote, root: pathlib.Path, seed: int) -> None:
        self.zygote, self.root, self.seed = zygote, root, seed
        self.known: dict[str, Undisturbed] = {}
        self.count = 0

    def fresh(self, kind: str) -> Scenario:
        self.count += 1
        return KINDS[kind](self.root / f"{kind.replace(' ', '-')}-{self.count}")

    def undisturbed(self, kind: str) -> Undisturbed:
        if kind not in self.known:
            scenario = self.fresh(kind)
            done = self.zygote.live(scenario.order(), {"point": 1_000_000})
            assert done["code"] == 0, done
            self.known[kind] = Undisturbed(scenario.found(), done["seconds"], done["points"])
        return self.known[kind]

    def dice(self, *about: object) -> random.Random:
        return random.Random(f"{self.seed} {about}")

    # --------------------------------------------------------------------------------------------------------- kills
    def kills(self, kind: str, number: int, faults: int, aims: tuple[str, ...] = ("moment", "file")) -> list[Order]:
        """A run of `kind` hit `faults` times: at a random `moment`, or inside an operation on a `file`."""
        usual, dice, scenario = self.undisturbed(kind), self.dice("kills", kind, number), self.fresh(kind)
        records: list[Order] = []
        for i in range(faults):
            aim = aims[i % len(aims)]
            fault = self._fault(kind, aim, usual, dice, faults)
            order = scenario.order() | {"leave": kind == "sweep" and dice.random() < 0.5}
            life = self.zygote.live(order, fault)
            harmed = bool(life["moment"])
            record = {"scenario": kind, "case": number, "fault": "kill", "aim": aim, "moment": life["moment"]}
            records.append(record | {"outcome": "went on" if harmed else "unharmed"})
            if life["code"] == 0:
                break
            if not harmed and (trouble := self._trouble(life, None)):
                records[-1] |= trouble
                break
        return self._end(scenario, usual, records)

    def _fault(self, kind: str, aim: str, usual: Undisturbed, dice: random.Random, faults: int) -> Order:
        if aim == "file":
            most = max(2, 2 * usual.points // faults)
            who = dice.choice(("life", "worker", "worker"))
            return {"point": dice.randrange(1, most), "who": who, "tear": dice.choice((0.0, dice.random(), 1.0))}
        who = dice.choice(("life", "worker", "all")) if kind == "sweep" else "life"
        return {"after": dice.uniform(0.01, 2 * usual.seconds / faults), "who": who}

    def _end(self, scenario: Scenario, usual: Undisturbed, records: list[Order]) -> list[Order]:
        """Start again until it is done; then compare."""
        tries, life = 1, self.zygote.live(scenario.order())
        while life["code"] and tries < TRIES:
            tries, life = tries + 1, self.zygote.live(scenario.order())
        records[-1]["tries"] = tries
        if life["code"]:
            records[-1] |= {"outcome": "lost", "detail": life["said"][-500:]}
        if records[-1]["outcome"] in GOOD and (what := self._differs(scenario, usual)):
            told = what.endswith("rows of metrics are missing") and "rows are lost" in records[-1].get("said", "")
            records[-1] |= {"outcome": "told" if told else "wrong", "detail": what}
        if records[-1]["outcome"] in GOOD:
            shutil.rmtree(scenario.root)
        return records

    def _differs(self, scenario: Scenario, usual: Undisturbed) -> str | None:
        try:
            return scenario.differs(usual.facts)
        except Exception as error:
            return f"its files cannot be read: {error!r}"

    # -------------------------------------------------------------------------------------------------------- damage
    def damages(self, kind: str, number: int, *, finished: bool) -> Iterator[Order]:
        """Every kind of damage to every file that the scenario has then, a case each."""
        usual = self.undisturbed(kind)
        first = self._stopped(kind, usual, self.dice("damage", kind, number), finished=finished)
        names = [str(path.relative_to(first.root)) for path in first.files()]
        shutil.rmtree(first.root)
        for how in DAMAGES:
            for name in names:
                yield self.damaged(kind, number, name, how, finished=finished)

    def damaged(self, kind: str, number: int, name: str, how: str, *, finished: bool) -> Order:
        usual, dice = self.undisturbed(kind), self.dice("damage", kind, number, name, how, finished)
        scenario = self._stopped(kind, usual, self.dice("damage", kind, number), finished=finished)
        record = {"scenario": kind, "case": number, "fault": how, "moment": "finished" if finished else "killed"}
        matches = [path for path in scenario.files() if _same(str(path.relative_to(scenario.root)), name)]
        if not matches or not matches[0].stat().st_size:
            shutil.rmtree(scenario.root)
            return record | {"file": name, "outcome": "unharmed"}
        path = matches[0]
        record["file"] = _shown(path)
        damage(path, how, dice)
        life = self.zygote.live(scenario.order())
        user = scenario.user_of(path)
        log = user / "worker.log"  # of a sweep
        record["said"] = life["said"].strip()[-400:] or (log.read_text().strip()[-400:] if log.exists() else "")
        if not life["code"] and (user / "result.json").exists():  # what a finished run has is looked at when it is used
            life = self.zygote.live({"do": "eval", "folder": str(user)})
        record["outcome"] = "went on"
        if life["code"]:
            record["said"] = life["said"].strip()[-400:]
            record |= self._trouble(life, path) or {"outcome": "refused"}
            if record["outcome"] == "refused":
                scenario.mend(path)
        elif path.name == "config.json" and how == "flipped" and self._rewritten(scenario, path):
            return record | {"outcome": "as written"}
        return self._end(scenario, usual, [record])[0]

    def _rewritten(self, scenario: Scenario, path: pathlib.Path) -> bool:
        """Whether another configuration of the same run was taken; the scenario is then over."""
        wanted, came = scenario.config_of(path.parent), read_config(path)
        other = replace(came, folder=None) != replace(wanted, folder=None)
        assert digest(came) == digest(wanted)
        if other:
            shutil.rmtree(scenario.root)
        return other

    def _stopped(self, kind: str, usual: Undisturbed, dice: random.Random, *, finished: bool) -> Scenario:
        """A scenario that was killed somewhere in its second half, or has finished."""
        scenario = self.fresh(kind)
        point = 1_000_000 if finished else dice.randrange(usual.points // 2, usual.points - 2)
        self.zygote.live(scenario.order(), {"point": point, "tear": 1.0})
        return scenario

    def _trouble(self, life: Order, path: pathlib.Path | None) -> Order | None:
        """None for an end in one line that names the file."""
        lines = life["said"].strip().splitlines()
        clear = len(lines) >= 1 and lines[-1].startswith("polyhead: ") and "Traceback" not in life["said"]
        if clear and life["code"] in (1, 2) and (path is None or str(path.parent) in lines[-1]):
            return None
        return {"outcome": "unclear", "detail": f"exit code {life['code']}: {life['said'][-500:]}"}


def _same(name: str, wanted: str) -> bool:
    """Names of token files begin with a hash of where the documents lie, which differs from case to case."""
    return name == wanted or (name.startswith("tokens/") and name.split(".")[1:] == wanted.split(".")[1:] != [])


def _shown(path: pathlib.Path) -> str:
    kept = path.name
    for ending in ("train.bin", "validation.bin", "iid.bin", "tokenizer.json", "journal"):
        if path.parent.parent.name == "tokens" and path.name.endswith(ending):
            kept = f"STEM.{ending}"
    if kept.startswith("checkpoint-"):
        kept = "checkpoint-STEP.safetensors"
    return kept

"""Cases of faults: a run is killed or damaged, restarted as its user would, and compared with an undisturbed run.

    kills     a run is killed several times in a row, then left alone
    damage    a run is stopped (or has finished), one of its files is damaged, and it is restarted

A case gives a list of records, one per fault: its kind, its time, and its outcome.  `outcome` is one of

    unharmed      the process ended before the fault
    went on       the next process resumed, or started from step 0, without help
    refused       one clear line that names the file or its folder, a non-zero exit code, and repairing the file helps
    as written    config.json is valid and the same run, but with other settings for logging, which are used
    told          rows of metrics.jsonl are lost, and one line says so; scores and parameters are right
    unclear       it stopped without such a line
    lost          the run could not be finished
    wrong         its result differs from that of the undisturbed run, as described in `detail`
"""

import pathlib
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lives import DAMAGES, Order, Zygote, damage
from scenarios import KINDS, Scenario

from polyhead.config import digest
from polyhead.train import read_config

GOOD = ("unharmed", "went on", "refused", "as written", "told")
TRIES = 8
"""Lives without a fault after which a run counts as lost."""


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed scenario: its folder, facts and duration, and the number of operations that change files."""

    root: pathlib.Path
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
            self.known[kind] = Undisturbed(scenario.root, scenario.found(), done["seconds"], done["points"])
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
        user, told = scenario.user_of(path), path.name == "metrics.jsonl"
        log = user / "worker.log"  # of a sweep
        record["said"] = life["said"].strip()[-400:] or (log.read_text().strip()[-400:] if log.exists() else "")
        if not life["code"] and (user / "result.json").exists():  # its files are read when it is used
            life = self.zygote.live({"do": "train" if told else "use", "folder": str(user)})
            record["said"] += life["said"].strip()[-400:]
        record["outcome"] = "went on"
        if life["code"]:
            record["said"] = life["said"].strip()[-400:]
            record |= self._trouble(life, path) or {"outcome": "refused"}
            if record["outcome"] == "refused":
                for name in {path.name, *re.findall(r"[\w-]+\.safetensors", life["said"])}:
                    scenario.mend(path.with_name(name))
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
    if path.parent.parent.name == "tokens":
        return re.sub(r".*(train.bin|validation.bin|iid.bin|tokenizer.json|journal)$", r"STEM.\1", path.name)
    return re.sub(r"^checkpoint-\d+", "checkpoint-STEP", path.name)

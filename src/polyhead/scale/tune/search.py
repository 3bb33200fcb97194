"""Hyper-parameter search: Optuna proposes settings, the workers of a sweep train them.

A study is a folder.  study.json holds its settings, study.journal is Optuna's record with one line of JSON per event,
and every trial is an ordinary run in FOLDER/NAME-DIGEST.  Trial n depends on its own streams, such as
stream(seed, "tune", n), and on the results so far.  So with one worker a study is a pure function of its settings,
interrupted or not.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import time
import warnings
from collections.abc import Mapping
from typing import Any

from polyhead import config as configs
from polyhead.config import Run, check_run, serial, stream
from polyhead.config.extensions import handed_on
from polyhead.scale.sweep.engines.local import Local
from polyhead.scale.sweep.job import Failure, Job
from polyhead.scale.sweep.jobs import LOOK_SECONDS, interruptible
from polyhead.scale.sweep.status import place_of
from polyhead.scale.tune.screen import SearchScreen, short
from polyhead.scale.tune.space import Range, Space, changed, read_space
from polyhead.scale.tune.trial import DONE, FAILED, PRUNED, RUNNING, Outcome, Trial
from polyhead.spec.optional import optional
from polyhead.spec.shapes import check_number, one_of
from polyhead.tasks import KINDS
from polyhead.train.checks import check, read_all
from polyhead.train.stop import MISTAKE, StopSignals
from polyhead.train.store.claims import FolderInUse, locked
from polyhead.train.store.disk import DiskRetry
from polyhead.train.store.files import check_folder, write
from polyhead.train.store.folder import Result, read_metrics
from polyhead.train.store.saving import selection_split

STUDY, JOURNAL, NAME = "study.json", "study.journal", "polyhead"
SAMPLERS, PRUNERS = ("tpe", "random"), ("median", "hyperband")
ENOUGH = 10
"""The fewest finished trials for importances; with fewer, importances are noise."""


def tune(
    run: Run,
    space: Mapping[str, str],
    *,
    folder: str | pathlib.Path,
    trials: int = 20,
    workers: int = 1,
    threads: int | None = None,
    sampler: str = "tpe",
    prune: str | None = None,
    progress: bool = True,
) -> Outcome:
    """Search for the best fields of `run`: tune(run, {"train.lr": "1e-4:1e-2:log"}, folder="runs/tune/a").

    The score is the task's main metric at the end of training, on split `validation` if it is in train.evaluate,
    else on the first split there.  `trials`: the total number, including earlier calls.  `prune`: stop trials that are
    worse than the median, or by hyperband.  A trial that fails, or has invalid settings, also counts.
    Raises ValueError for a folder that holds another study, Interrupted after Ctrl-C, when all have saved.
    """
    check_run("tune", run)
    one_of("tune", "sampler", sampler, SAMPLERS)
    if prune is not None:
        one_of("tune", "pruner", prune, PRUNERS)
    for name, value in (("trials", trials), ("workers", workers), ("threads", threads)):
        if value is not None:
            check_number("tune", name, value, 1)
    _optuna()  # before the folder is made
    question = _question(run, space, sampler, prune)
    check(run)
    read_all(run)
    path = pathlib.Path(folder)
    check_folder("tune", path)
    try:
        with handed_on(run, "tune"), locked(path):
            _claim(path, question)
            _mend(path / JOURNAL)
            study = _Study(run, path, question, new=True)
            with SearchScreen(study.outcome, enabled=progress) as screen:
                _Search(study, workers, threads, screen).work(trials)
    except FolderInUse:
        raise ValueError(f"tune: another process works on the study in {path}") from None
    return study.outcome(importance=True)


def status(folder: str | pathlib.Path) -> Outcome:
    """The current state of a study, also while another process works on it.  Nothing is written."""
    path = pathlib.Path(folder)
    if not (path / STUDY).is_file() or not (path / JOURNAL).is_file():
        raise ValueError(f"tune: {path} holds no study")
    try:
        question = serial.read(path / STUDY)
        run = configs.from_dict(question["run"], KINDS, where=str(path / STUDY))
        return _Study(run, path, question).outcome(importance=True)
    except ValueError:
        raise
    except Exception as error:  # a foreign file may raise any error
        raise ValueError(f"tune: {path} holds no study that can be read ({type(error).__name__}: {error})") from None


def _question(run: Run, space: Mapping[str, str], sampler: str, prune: str | None) -> dict[str, Any]:
    """The settings of a study as JSON.  Raises ValueError for a space that cannot be searched."""
    if not run.train.evaluate:
        raise ValueError("tune: nothing is evaluated: give train.evaluate a split")
    read_space(run, space)
    return {
        "digest": configs.digest(run),
        "space": dict(space),
        "sampler": sampler,
        "prune": prune,
        "split": selection_split(run.train),
        "metric": run.task.metric,
        "run": configs.to_dict(dataclasses.replace(run, folder=None)),
    }


def _claim(folder: pathlib.Path, question: dict[str, Any]) -> None:
    """Write the settings, or check that they equal those in the folder."""
    path = folder / STUDY
    if not path.exists():
        if (folder / JOURNAL).exists():
            raise ValueError(f"tune: {folder} holds {JOURNAL} but no {STUDY}; choose another folder or delete it")
        write(path, (json.dumps(question, indent=2) + "\n").encode())
        return
    there = serial.read(path)
    for name in ("digest", "space", "sampler", "prune"):
        if (theirs := there.get(name) if isinstance(there, dict) else None) != question[name]:
            what = f"{name} is {theirs} there and {question[name]} here"
            raise ValueError(f"tune: {folder} holds another study ({what}); choose another folder")


def _mend(journal: pathlib.Path) -> None:
    """Remove an incomplete last line, left by a crash or a full disk: Optuna would ignore all lines after it."""
    if journal.is_file() and not (text := journal.read_bytes()).endswith(b"\n"):
        write(journal, text[: text.rfind(b"\n") + 1])


def _optuna() -> Any:
    with optional("tune", "polyhead[tune]"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class _Study:
    """Optuna's side: proposals and their results."""

    def __init__(self, run: Run, folder: pathlib.Path, question: dict[str, Any], *, new: bool = False) -> None:
        self.run, self.folder, self.optuna = run, folder, _optuna()
        self.split, self.metric = question["split"], question["metric"]
        self.space: Space = read_space(run, question["space"])
        self.sampler, self.prune = question["sampler"], question["prune"]
        journal = self.optuna.storages.journal
        path = str(folder / JOURNAL)
        try:
            backend = journal.JournalFileBackend(path, lock_obj=journal.JournalFileOpenLock(path))
            storage = self.optuna.storages.JournalStorage(backend)
            if new and not storage.get_all_studies():
                direction = "maximize" if run.task.better == "higher" else "minimize"
                self.optuna.create_study(storage=storage, study_name=NAME, direction=direction)
            self.study = self.optuna.load_study(storage=storage, study_name=NAME, pruner=self._pruner())
            self.study.get_trials(deepcopy=False)  # reads the whole journal
        except Exception as error:  # Optuna hardly checks its journal
            raise ValueError(f"tune: {path} cannot be read ({type(error).__name__}: {error})") from None

    def _pruner(self) -> Any:
        pruners, train = self.optuna.pruners, self.run.train
        if self.prune == "hyperband":
            return pruners.HyperbandPruner(min_resource=min(train.eval_every, train.steps), max_resource=train.steps)
        return pruners.MedianPruner() if self.prune == "median" else pruners.NopPruner()

    def interrupted(self) -> list[int]:
        """Trials that were running when their process ended."""
        return [t.number for t in self.study.get_trials(deepcopy=False) if t.state.name == "RUNNING"]

    def count(self) -> int:
        return len(self.study.get_trials(deepcopy=False))

    def propose(self, number: int | None = None) -> Any:
        """The next trial; or the trial `number` again, whose proposal may be incomplete."""
        n = self.count() if number is None else number
        if number is None:
            trial = self.study.ask()
        else:
            trial = self.optuna.trial.Trial(self.study, self.study.get_trials(deepcopy=False)[number]._trial_id)
        for name, part in self.space.items():
            self._draw_from(f"tune/{name}", n)  # a separate stream per field: a crash may have left some drawn
            if not isinstance(part, Range):
                trial.suggest_categorical(name, part.values)
            elif isinstance(part.low, int) and isinstance(part.high, int):
                trial.suggest_int(name, part.low, part.high, log=part.log)
            else:
                trial.suggest_float(name, part.low, part.high, log=part.log)
        return trial

    def _draw_from(self, name: str, number: int) -> None:
        samplers = self.optuna.samplers
        kind = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler}[self.sampler]
        self.study.sampler = kind(seed=stream(self.run.seed, name, number) % 2**32)

    def tell(self, trial: Any, outcome: Result | Failure) -> None:
        """Report the end of a trial to Optuna.

        Invalid settings and divergence count as the worst score, so that the sampler learns from them.  A killed
        worker is no information about the settings, so its trial has no score.
        """
        states = self.optuna.trial.TrialState
        if isinstance(outcome, Failure):
            trial.set_user_attr("error", outcome.error)
            self.study.tell(trial, state=states.PRUNED if outcome.code == MISTAKE else states.FAIL)
        elif math.isfinite(score := outcome.scores[self.split][self.metric]):
            self.study.tell(trial, score)
        else:
            trial.set_user_attr("error", "its score is not finite")
            self.study.tell(trial, state=states.PRUNED)

    def outcome(self, *, importance: bool = False) -> Outcome:
        trials = tuple(self._trial(trial) for trial in self.study.get_trials(deepcopy=False))
        done = [trial for trial in trials if trial.state == DONE and trial.score is not None]
        best = max(done, key=lambda trial: self.run.task.gain(trial.score or 0.0), default=None)
        shares = self._importance() if importance and len(done) >= ENOUGH else {}
        return Outcome(self.folder, self.split, self.metric, trials, best, shares)

    def _trial(self, trial: Any) -> Trial:
        error, run = trial.user_attrs.get("error", ""), trial.user_attrs.get("run")
        states = {"COMPLETE": DONE, "PRUNED": FAILED if error else PRUNED, "FAIL": FAILED}
        state = states.get(trial.state.name, RUNNING)
        score = trial.value if state in (DONE, PRUNED) else None
        return Trial(trial.number, state, dict(trial.params), score, self.folder / run if run else None, error)

    def _importance(self) -> dict[str, float]:
        with contextlib.suppress(ValueError, RuntimeError), warnings.catch_warnings():  # fails if all scores are equal
            warnings.simplefilter("ignore")
            found = self.optuna.importance.get_param_importances(self.study)
            return {name: float(share) for name, share in found.items()}
        return {}


class _Search:
    """The running trials, each with its job.  Two trials share a job if a sampler proposes the same settings twice."""

    def __init__(self, study: _Study, workers: int, threads: int | None, screen: SearchScreen) -> None:
        self.study, self.workers, self.threads, self.screen = study, workers, threads, screen
        self.engine, self.retry = Local(), DiskRetry(StopSignals())
        self.working: list[tuple[Any, Job]] = []
        self.leaving: list[Job] = []  # pruned, and saving
        self.read: dict[int, int] = {}  # rows of metrics.jsonl that were reported to the pruner, by trial
        self.looked = 0.0

    def work(self, wanted: int) -> None:
        before = self.study.interrupted()
        with contextlib.ExitStack() as held:
            held.callback(self.engine.close)
            self.engine.open([self.study.run], self.study.folder, self.workers, self.threads)
            stop = held.enter_context(interruptible())
            try:
                while (more := before or self.study.count() < wanted) or self.working or self.leaving:
                    if more and len(self.working) + len(self.leaving) < self.workers:
                        self._begin(self.study.propose(before.pop(0) if before else None))
                    else:
                        self._look()
            except KeyboardInterrupt:
                became = self.engine.stop([job.handle for _, job in self.working if job.handle is not None])
                done = self.study.count() - len(self.study.interrupted())
                text = f"{became}; {done} of {wanted} trials are done, the same command resumes"
                raise stop.interrupted(text) from None

    def _begin(self, trial: Any) -> None:
        """Create the job of a trial; a trial with invalid settings ends at once."""
        try:
            run = dataclasses.replace(changed(self.study.run, trial.params), folder=None)
            check(run)
        except ValueError as error:
            said = str(error).removeprefix("tune: ")
            self._end(trial, Failure(self.study.run.name, self.study.folder, MISTAKE, said))
            return
        place = place_of(run, self.study.folder)
        trial.set_user_attr("run", place.name)
        shared = [job for _, job in self.working if job.folder == place]
        self.working.append((trial, shared[0] if shared else Job(run, place, retries=2)))
        chosen = ", ".join(f"{name} {short(value)}" for name, value in trial.params.items())
        self.screen.line(f"trial {trial.number}: {chosen} ({place})")

    def _look(self) -> None:
        """Poll all running jobs once."""
        look = time.monotonic() - self.looked > LOOK_SECONDS
        self.looked = time.monotonic() if look else self.looked
        for job in dict.fromkeys([job for _, job in self.working] + self.leaving):
            self._tend(job, look)
        self.leaving = [job for job in self.leaving if job.handle is not None]  # however it ended: it is not restarted
        for trial, job in list(self.working):
            if self.study.prune and self._hopeless(trial, job):
                self._prune(trial, job)
            elif job.outcome is not None:
                self.working.remove((trial, job))
                self._end(trial, job.outcome)
        self.screen.update({trial.number: job.text() for trial, job in self.working})
        if self.working or self.leaving:
            time.sleep(self.engine.pause)

    def _tend(self, job: Job, look: bool) -> None:
        """As in a sweep: start the job, restart it, or watch another process that trains it."""
        if job.outcome is not None:
            return
        if job.holder is not None:
            if look:
                job.look()
        elif job.handle is not None:
            job.poll()
        elif self.retry(job.ready):
            job.handle, job.training = self.retry(functools.partial(self.engine.start, [job.folder]))[0], True

    def _hopeless(self, trial: Any, job: Job) -> bool:
        """Report the evaluations so far to the pruner, without the final one; True if the pruner stops the trial."""
        if job.read == self.read.get(trial.number, 0):
            return False
        self.read[trial.number] = job.read
        known = self.study.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for row in read_metrics(job.folder):
            counts = row["kind"] == "eval" and row.get("split") == self.study.split
            step, score = row["step"], row.get(self.study.metric)
            if counts and step < job.config.train.steps and isinstance(score, (int, float)) and math.isfinite(score):
                if step not in known:
                    trial.report(score, step)
                if trial.should_prune():
                    return True
        return False

    def _prune(self, trial: Any, job: Job) -> None:
        """Let the worker of a pruned trial save and stop, unless another trial has the same run."""
        self.working.remove((trial, job))
        self.study.study.tell(trial, state=self.study.optuna.trial.TrialState.PRUNED)
        if job.outcome is None and all(other is not job for _, other in self.working):
            handle: Any = job.handle
            if handle is not None:
                handle.terminate()
                self.leaving.append(job)
        self._say(trial.number)

    def _end(self, trial: Any, outcome: Result | Failure) -> None:
        self.study.tell(trial, outcome)
        self._say(trial.number)

    def _say(self, number: int) -> None:
        state = self.study.outcome()
        trial, best = state.trials[number], state.best
        what = f"{state.split} {state.metric} {trial.score:.4f}" if trial.score is not None else trial.error
        so_far = f"; best so far: trial {best.number}, {best.score:.4f}" if best is not None else ""
        self.screen.line(f"trial {number}: {trial.state}: {what}{so_far}")

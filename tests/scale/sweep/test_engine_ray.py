"""A sweep on a real Ray cluster of two machines, one of which fails.  Skipped without Ray."""

import importlib.util
import os
import pathlib
import signal
import socket
import threading
import time

import pytest
from many_runs import check_all, many_runs, process, working

from polyhead.scale.sweep.engines import GONE, Resources, ray as engine_ray
from polyhead.scale.sweep.engines.ray import Ray
from polyhead.scale.sweep.jobs import sweep

with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture
def cluster():
    """Two machines of one core each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@with_ray
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore")
def test_a_worker_is_killed_and_a_machine_vanishes(cluster, tmp_path):
    runs, folder = many_runs(), tmp_path / "sweep"
    hit: list[pathlib.Path] = []
    over = threading.Event()

    def wait(machine=None):
        """A run that is being trained, on this machine."""
        while not over.is_set():
            for place in working(folder):
                if place not in hit and (machine is None or raylet_of(process(place)) == raylet(machine)):
                    return place
            time.sleep(0.05)
        raise AssertionError("the sweep ended first")

    def disturb():
        hit.append(wait())
        os.kill(process(hit[0]), signal.SIGKILL)
        hit.append(wait(cluster.second))
        cluster.remove_node(cluster.second, allow_graceful=False)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        outcomes = sweep(runs, folder, engine=Ray(cluster.address))
    finally:
        over.set()
        thread.join()
    check_all(runs, outcomes, folder, tmp_path / "plain")
    said = {log.parent: log.read_text() for log in folder.glob("*/worker.log")}
    again = {place: text for place, text in said.items() if "started again" in text}
    assert set(again) == set(hit)
    assert "started again (1 of 2): killed by signal 9" in again[hit[0]]
    lost = again[hit[1]]  # Ray may still say that it has killed the worker, or no more
    assert "started again (1 of 2): lost: its machine" in lost or "(1 of 2): killed by signal 9" in lost


def raylet(machine):
    return machine.all_processes["raylet"][0].process.pid


def raylet_of(worker):
    """The process whose task's process this worker is."""
    parent = worker
    for _ in range(2):
        try:
            parent = int(pathlib.Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            return 0
    return parent


@with_ray
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_what_ray_cannot_give_and_a_folder_it_cannot_see(tmp_path):
    run = many_runs()[:1]
    for resources, most in ((Resources(cpus=4096), " CPU"), (Resources(gpus=64.0), " GPU")):
        line = "^sweep: a run wants more than any machine of the Ray cluster has: "
        with pytest.raises(ValueError, match=f"{line}.*{most}$"):
            sweep(run, tmp_path, engine=Ray("local", resources))
    engine = Ray("local")
    assert engine.open(run, tmp_path, None, None) == 1
    try:
        (task,) = engine.start([tmp_path / "nowhere"])
        while task.code() is None:
            time.sleep(0.05)
        assert task.code() == 1
    finally:
        engine.close()


def test_no_ray_and_no_cluster():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]  # bound, without a listener
        for address, line in (
            (f"127.0.0.1:{port}", f"sweep: no Ray cluster at 127.0.0.1:{port} "),
            ("somewhere", "sweep: --ray wants HOST:PORT, auto or local but 'somewhere' came"),
            ("here:port", "sweep: --ray wants HOST:PORT, auto or local but 'here:port' came"),
        ):
            with pytest.raises(ValueError, match=f"^{line}"):
                engine_ray._answers(address)


def test_a_worker_dies_with_its_task():
    """The second argument is the process that started it: here it is not the parent."""
    assert engine_ray.main(["nowhere", str(os.getpid())]) == GONE - 1

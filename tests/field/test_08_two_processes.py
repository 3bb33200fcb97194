"""Processes that do not find each other say for whom they wait, and Ctrl-C ends them."""

import os
import signal
import socket
import subprocess
import sys

import forked
import pytest
from run_folders import rows

import polyhead as ph
from polyhead.train import launch
from polyhead.train.__main__ import main

WAIT = """
import sys
from polyhead.train import world
from polyhead.train.__main__ import main
world.SILENCE = 0.0
sys.exit(main([sys.argv[1], "--quiet"]))
"""


def environment(rank, **changes):
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **changes}


@pytest.fixture
def folder(tiny, tmp_path):
    ph.config.save(tiny(None), tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize(("rank", "other"), [(0, "process 1"), (1, "process 0")])
def test_a_process_says_for_whom_it_waits_and_ctrl_c_ends_it(folder, rank, other):
    reader, writer = os.pipe()
    with open(reader) as lines, open(writer, "w") as stream:
        command = [sys.executable, "-c", WAIT, str(folder)]
        port = str(launch.free_port())
        process = forked.Process(command, stdout=stream, stderr=stream, env=environment(rank, MASTER_PORT=port))
        assert f"waits for {other}" in lines.readline()
        process.send_signal(signal.SIGINT)
        code = process.wait()
        stream.close()
        assert code == 130, lines.read()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"MASTER_PORT": "http"}, "the environment variable MASTER_PORT must be an integer but is 'http'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be a port from 1 to 65535 but is 99999"),
        ({"MASTER_PORT": ""}, "several processes need MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "one"}, "the environment variable RANK must be an integer but is 'one'"),
        ({"WORLD_SIZE": "two"}, "the environment variable WORLD_SIZE must be an integer but is 'two'"),
    ],
)
def test_a_wrong_launcher_variable_is_one_line_of_the_first_process(folder, monkeypatch, capsys, changes, error):
    for name, value in environment(0, **changes).items():
        monkeypatch.setenv(name, value)
    assert main([str(folder), "--quiet"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("polyhead: world: ")
    assert message.count("\n") == 1
    assert error in message
    monkeypatch.setenv("LOCAL_RANK", "1")  # another process of the same machine: it has been said
    assert main([str(folder), "--quiet"]) == 2
    assert capsys.readouterr().err == ""


def test_an_empty_launcher_variable_is_an_absent_one(tiny, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "")
    assert ph.train.run(tiny(tmp_path, steps=1), progress=False).steps == 1


def test_a_port_in_use_is_one_line(folder):
    with socket.socket() as listener, open(folder / "log", "w+") as log:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        command = [sys.executable, "-c", WAIT, str(folder)]
        process = forked.Process(command, stdout=log, stderr=log, env=environment(0, MASTER_PORT=port))
        assert process.wait() == 2
        log.seek(0)
        assert f"port {port} of 127.0.0.1 is in use; set MASTER_PORT to another one" in log.read()


def test_two_devices_do_not_need_the_name_of_this_machine(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda *name: pytest.fail("the machine's name was looked up"))
    monkeypatch.setattr(socket, "gethostname", lambda: pytest.fail("the machine's name was looked up"))
    launch.train(tiny(tmp_path / "run", steps=2), 2, progress=False)
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [1, 2]


def test_different_runs_of_one_step_of_slurm_are_refused(tiny, tmp_path):
    """`srun -n 2 bash -c "polyhead train ... --seed $SLURM_PROCID"` would average the gradients of two runs."""
    port, processes = str(launch.free_port()), []
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        ph.config.save(tiny(None, seed=rank), tmp_path / str(rank) / "config.json")
        command = [sys.executable, "-m", "polyhead.train", str(tmp_path / str(rank)), "--quiet"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(forked.Process(command, env=environment(rank, MASTER_PORT=port), **pipes))
    output = "".join(process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert output.count("the 2 processes of one run have different runs; start each run by a step of its own") == 1
    assert not list(tmp_path.rglob("checkpoint*"))

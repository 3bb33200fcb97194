"""A Slurm of one machine and two cores, started from nothing in a folder.  Debian: slurm-wlm and munge, as root."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

NEEDED = ("sbatch", "srun", "squeue", "scontrol", "slurmctld", "slurmd", "munged")

CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={control}
SlurmdPort={worker}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Why no Slurm can be started here, or nothing."""
    absent = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"Slurm is not installed: no {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "Slurm is started by root only"


@contextlib.contextmanager
def slurm(folder):
    """What must be in the environment of those who use it."""
    folder.mkdir(mode=0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host, (control, worker) = socket.gethostname().split(".")[0], ports(2)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, control=control, worker=worker, folder=folder))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    path = f"{os.environ['PATH']}:/usr/sbin"
    variables = {"SLURM_CONF": str(config), "PATH": path, "MUNGE_SOCKET": str(folder / "munge.socket")}
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    started = []
    environment = {**os.environ, **variables}
    with open(folder / "said.log", "ab") as log:
        try:
            for words in (munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]):
                started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
                _until(lambda: (folder / "munge.socket").exists(), started, folder)
            _until(lambda: _idle(environment), started, folder)
            yield variables
        finally:
            subprocess.run(["scancel", "--me", "--full", "--signal=KILL"], env=environment, stdout=log, stderr=log)
            for process in reversed(started):
                process.terminate()
                process.wait()


def ports(count):
    """Free ones."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _idle(environment):
    asked = subprocess.run(["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True)
    return asked.stdout.strip() == "idle"


def _until(done, started, folder):
    while not done():
        for process in started:
            assert process.poll() is None, (process.args, (folder / "said.log").read_text()[-2000:])
        time.sleep(0.05)

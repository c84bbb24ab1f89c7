"""Runs of 06 as processes of their own, alone or several that find each other as those of torchrun do.

They are forked from a server that has imported everything once, so that a start takes no time.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket

import pytest
import torch
from conftest import ROOT, TESTS

if not hasattr(os, "fork"):
    pytest.skip("these tests start and kill processes the POSIX way", allow_module_level=True)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def context():
    """The way to start processes."""
    here, found = os.path.dirname(__file__), multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["processes", "06_full_llm_training", "transformers.models.qwen2.modeling_qwen2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TESTS), here]))
        multiprocessing.forkserver.ensure_running()
    return found


def run_child(function, arguments, log, environment):
    """In the child: the call, as in a terminal that is open, with its output in a file."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for number in SIGNALS:  # nohup, and a shell's &, let a child inherit ignored ones
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments)


def start(function, *arguments, log, **environment):
    process = context().Process(target=run_child, args=(function, arguments, log, environment))
    process.start()
    return process


def call(function, *arguments, log):
    """(exit status, output) of a call in a process of its own; a status of −9 is a SIGKILL."""
    process = start(function, *arguments, log=log)
    process.join(60)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode, log.read_text()


def call_together(function, *arguments, folder, size=2):
    """[(exit status, output)] of the same call in processes with the environment that torchrun gives them."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    logs = [folder / f"rank-{rank}" for rank in range(size)]
    processes = [start(function, *arguments, log=log, WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK=str(rank),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank, log in enumerate(logs)]
    for process in processes:
        process.join(120)
        assert process.exitcode is not None, "the processes hang"
    return [(process.exitcode, log.read_text()) for process, log in zip(processes, logs)]

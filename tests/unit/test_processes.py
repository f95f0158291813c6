"""The server of tests/processes.py, on which all of its children depend."""

import os
import sys

import pytest
import torch

from tests.processes import MODULES, new_processes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="processes are spawned")


def describe(answers) -> None:
    """What a child has before it does anything."""
    loaded = [name in sys.modules for name in MODULES]
    answers.put((loaded, len(os.listdir("/proc/self/task")), os.getppid()))


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_children_have_the_modules_and_one_thread():
    context = new_processes()
    answers = context.SimpleQueue()
    child = context.Process(target=describe, args=(answers,))
    child.start()
    loaded, threads, parent = answers.get()
    child.join()
    assert all(loaded)
    assert len(os.listdir(f"/proc/{parent}/task")) == 1  # a fork has only the thread that forked
    assert threads == 1
    assert parent != os.getpid()

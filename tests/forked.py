"""The server of tests/programs.py: it has imported modules, and forks for who connects.

A program of its own, which imports nothing of the tests:

    python forked.py SOCKET MODULE...

Each connection brings open files and an order: arguments of `python`, environment, folder, what
`sys.executable` is, and the numbers of the files. It gets back how the program ended; if it closes
first, the program is ended.
"""

import fcntl
import importlib
import os
import select
import signal
import socket
import sys


def serve(path: str, modules: list[str]) -> None:
    """Until the input ends, which who started this holds open."""
    del sys.path[0]  # the folder of this file
    for name in modules:
        importlib.import_module(name)
    if "torch._inductor.compile_fx" in modules:
        # Compiles five small programs, which is remembered here and by each cache on disk.
        importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch
    while 0 not in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            watch(connection)
        connection.close()


def watch(connection: socket.socket) -> None:
    """Run one program to its end."""
    import json

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, *_ = socket.recv_fds(connection, 8, 250)
    with connection.makefile("rb") as rest:
        *order, numbers = json.loads(rest.read(int.from_bytes(head, "big")))
    child = os.fork()
    if child == 0:
        take(files, numbers)
        become(*order)
    for file in files:
        os.close(file)
    if connection in select.select([os.pidfd_open(child), connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    except BrokenPipeError:
        pass  # who asked has ended as well
    os._exit(0)


def take(files: list[int], numbers: list[int]) -> None:
    """Have these files at these numbers, and no others."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]
    os.closerange(3, 500)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def become(arguments: list[str], environment: dict[str, str], folder: str, python: str) -> None:
    """Run a program as a new interpreter would, and end."""
    import atexit
    import threading
    import traceback

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = python
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [one for one in folders if one and one not in sys.path]
    status = 0
    try:
        run(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        # What an interpreter does last.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(arguments: list[str]) -> None:
    """`python arguments`."""
    import runpy

    first, *rest = arguments
    if first == "-u":
        sys.stdout.reconfigure(write_through=True)
        run(rest)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])

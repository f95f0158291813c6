"""What stands in for a Python interpreter: it asks the server of tests/programs.py to be one.

A program of its own: python -IS asking.py SOCKET EXECUTABLE ARGUMENT...
"""

import json
import os
import signal
import socket
import sys


def ask(path: str, executable: str, arguments: list[str]) -> None:
    """Have a program run with the files of this one, and end as it does."""
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    order = json.dumps([arguments, dict(os.environ), os.getcwd(), executable, files]).encode()
    socket.send_fds(connection, [len(order).to_bytes(8, "big")], files)
    connection.sendall(order)
    status = int(connection.recv(16) or b"1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(number: int) -> bool:
    """Whether it is a file of this process, and not the list of its files."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2], sys.argv[3:])

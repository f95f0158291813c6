"""What the server of tests/programs.py does; executed there, because it has imported no test."""


def serve(orders):
    """Fork for each line: code, environment, and two files for what it writes."""
    import json
    import os

    for order in orders:
        child = os.fork()
        if child == 0:
            become(*json.loads(order))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(code, environment, out, err):
    """Run code as a new interpreter would, and end."""
    import atexit
    import os
    import sys
    import threading
    import traceback

    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
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

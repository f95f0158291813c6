"""The benchmark of the mesh: its trial on a CPU, and its arithmetic."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import mesh, mesh_profile, turns
from tests.programs import INDUCTOR, python

ROOT = Path(__file__).resolve().parents[2]


def test_the_program_runs_on_a_cpu(tmp_path):
    # As torchrun starts it, without the seconds of torchrun itself.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    options = "-m benchmarks.mesh --device cpu --jobs ^documents-64k --layers 2 --rounds 2".split()
    processes = [
        subprocess.Popen(
            [python(*INDUCTOR), *options, "--json", str(tmp_path / f"{rank}.json")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | settings | {"RANK": str(rank), "PYTHONPATH": path},
        )
        for rank in range(2)
    ]  # fmt: skip
    output = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], output
    assert "| documents-64k |" in output[0] and not output[1]
    (result,) = json.loads((tmp_path / "0.json").read_text())
    ranks = result["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert [len(rank["errors"]) for rank in ranks] == [6, 6]
    assert all(rank["one"]["row"] > 0 for rank in ranks)
    for operation in ("cast", "return"):
        received = [rank["mesh"]["moved"][operation] for rank in ranks]
        assert max(received) == ranks[0]["planned"] > 0


def test_where_the_time_goes():
    kernels = [
        ("attention", 0, 10), ("ncclSendRecv", 4, 14), ("attention", 20, 30), ("copy", 29, 31),
    ]  # fmt: skip
    found = mesh_profile.summary([(n, float(a), float(b)) for n, a, b in kernels], 1.0)
    assert found == {"span": 31, "computing": 21, "moving": 10, "hidden": 6, "idle": 6}


def _result(milliseconds: float, computing: float) -> dict:
    parts = {"computing": computing, "moving": 1.0, "hidden": 0.5, "idle": 0.25}
    moved = {"cast": 2e6, "return": 3e6}
    return {"row": milliseconds, "host": 1.5, "moved": moved, **parts}


def test_a_table_of_jobs():
    options = mesh.parse_arguments(["--in-tree", "--jobs", "^causal-64k"])
    jobs = mesh.make_jobs(options)
    assert [job.who for job in jobs] == ["flexhop", "in-tree"]
    first = {"rank": 0, "planned": 2_000_000, "one": {"row": 17.0}, "mesh": _result(9.0, 7.0)}
    second = {"rank": 1, "planned": 2_000_000, "one": {"row": 18.0}, "mesh": _result(10.0, 8.0)}
    intree = {"ranks": [{"rank": 0, "planned": 0, "mesh": _result(20.0, 7.0)}]}
    text = mesh.table(jobs, [{"ranks": [first, second]}, intree])
    expected = (
        "| causal-64k | 17.00 | 18.00 | 20.00 | 10.00 | 0.900 | 1.50 | 2.0 | 2.0 | 3.0 | 8.00 |"
    )
    assert expected in text


def test_a_job_that_failed_has_no_row():
    job = mesh.make_jobs(mesh.parse_arguments(["--jobs", "^causal-64k"]))[0]
    assert mesh.table([job], ["died"]).count("\n") == 1
    assert mesh.details(job, "died") == "- causal-64k, flexhop: died"


def test_the_trial_has_no_peer():
    with pytest.raises(SystemExit):
        mesh.parse_arguments(["--device", "cpu", "--in-tree"])


def test_the_error_is_named_not_the_warning_after_it():
    text = (
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]:   File x\n"
        "[rank0]: torch._dynamo.exc.Unsupported: skipped\n"
        "[rank0]:   Hint: none\n"
        "[rank0]:[W1123 06:42 ProcessGroupNCCL.cpp:1575] Warning: not called\n"
    )
    assert turns.last_words(text) == "[rank0]: torch._dynamo.exc.Unsupported: skipped"
    assert turns.last_words("a\nb\n") == "b"

"""The benchmark of transformers' models: its data, one row on a CPU, its tables."""

import argparse
import os

import pytest

from benchmarks import models, models_worker

OPTIONS = argparse.Namespace(device="cpu", compile=False, loading=0.0)


def test_packed_documents_fill_a_row() -> None:
    inputs = models_worker.packed(192, 128, "cpu")
    assert all(tensor.shape == (1, 192) for tensor in inputs.values())
    positions = inputs["position_ids"][0]
    starts = positions.diff() != 1
    assert positions[0] == 0 and starts.any()  # several documents
    assert (positions[1:][starts] == 0).all()
    assert inputs["input_ids"].max() < 128


def test_a_training_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # of a worker's process
        monkeypatch.setenv(name, os.environ.get(name, ""))
    found = models_worker.train("Llama", "sdpa", OPTIONS)
    assert found["last_loss"] < found["first_loss"]
    assert 0 < found["milliseconds"] < 1e3 * 60 and found["first_seconds"] > 0
    assert found["peak_bytes"] is None


def test_training_steps_as_a_table() -> None:
    known = {"model": "Llama", "implementation": "sdpa"}
    measured = {
        "first_seconds": 2.96, "milliseconds": 317.13, "peak_bytes": 3 << 29,
        "first_loss": 10.7783, "last_loss": 0.0177,
    }  # fmt: skip
    results = [
        {**known, "compiled": True, **measured},
        {**known, "compiled": False, "failed": "too long"},
    ]
    assert models.training_table(results).splitlines()[2:] == [
        "| Llama, compiled, `sdpa` | 317.1 | 1.5 | 3.0 | 10.778 | 0.018 |",
        "| Llama, `sdpa` | – | – | – | – | – |",
    ]


def test_generation_as_a_table() -> None:
    result = {
        "model": "Llama", "implementation": "flexhop", "compiled": False,
        "first_seconds": 11.59, "tokens_per_second": 716.8,
    }  # fmt: skip
    assert models.generation_table([result]).endswith("| Llama, `flexhop` | 717 | 11.6 |")


def test_rows_run_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(commands: list[list[str]], at_once: int, seconds: float) -> list[object]:
        asked.append(commands[0])
        return [{"tokens_per_second": 9.0} if commands[0][3] == "Llama" else "process ended: no"]

    asked: list[list[str]] = []
    monkeypatch.setattr(models, "in_turn", answer)
    options = models.parse_arguments(
        ["--device", "cpu", "--generate", "--loading", "3", "--implementations", "sdpa"]
    )
    first, second = models.measure(options)
    assert asked[0] == [
        "benchmarks.models", "--worker", "--models", "Llama", "--implementations", "sdpa",
        "--device", "cpu", "--loading", "3.0", "--generate",
    ]  # fmt: skip
    assert first == {
        "model": "Llama", "implementation": "sdpa", "compiled": False, "tokens_per_second": 9.0,
    }  # fmt: skip
    assert second["failed"] == "process ended: no"

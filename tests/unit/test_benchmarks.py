"""The benchmark's arithmetic: areas, operations, documents, budgets and tables."""

import contextlib
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    area,
    correctness,
    decoding,
    decoding_cases,
    derivatives,
    derivatives_worker,
    drawn,
    report,
    steps,
    varlen,
    varlen_cases,
    varlen_worker,
)
from benchmarks.cases import CASES, PREFIX, WINDOW, document_ids, make_mask_mod, make_score_mod
from flexhop.lowering import derivative as derivative_lowering
from flexhop.lowering.chunked import lower_definition
from flexhop.offline import generate_code
from tests.programs import INDUCTOR, python

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {case.name: case for case in CASES}


def closed_form(pattern: str, s: int) -> int:
    triangle = s * (s + 1) // 2
    window, prefix = min(WINDOW, s // 4), min(PREFIX, s // 4)
    return {
        "full": s * s,
        "causal": triangle,
        "sliding": triangle - (s - window) * (s - window + 1) // 2,
        "prefix": triangle + prefix * (prefix - 1) // 2,
    }[pattern]


@pytest.mark.parametrize("name", ["full-4k-d128", "causal-2k-d128", "sliding-16k", "prefix-8k"])
def test_counted_area_is_the_closed_form(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(area, "CHUNK_ELEMENTS", 1 << 14)  # many chunks
    case = BY_NAME[name].shrunk()
    counted = area.unmasked_area(case, make_mask_mod(case, "cpu"), "cpu")
    assert counted == case.batch * case.q_heads * closed_form(case.pattern, case.length)


def test_document_area_is_the_sum_of_squares():
    case = BY_NAME["document-16k"].shrunk()
    lengths = document_ids(case.length, "cpu", case.length // 4).bincount()
    counted = area.unmasked_area(case, make_mask_mod(case, "cpu"), "cpu")
    assert counted == case.batch * case.q_heads * int(lengths.square().sum())


def test_documents_have_the_mean_they_promise():
    ids = document_ids(1 << 18, "cpu")
    assert ids[0] == 0
    assert set(ids.diff().unique().tolist()) <= {0, 1}
    assert 900 < ids.numel() / (int(ids[-1]) + 1) < 1150


def test_operations():
    assert area.forward_flops(10, 64, 32) == 2 * 10 * 96
    assert area.backward_flops(10, 64, 32) == 2 * 10 * (3 * 64 + 2 * 32)
    assert area.flops("bwd", 10, 64) == 2.5 * area.flops("fwd", 10, 64)


@pytest.mark.parametrize("name", ["causal-8k-gqa", "alibi-8k", "document-16k", "rel-bias-4k"])
def test_reference_in_chunks_is_plain_attention(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(correctness, "ROWS", 96)  # does not divide the length
    case = BY_NAME[name].shrunk()
    q_shape = (case.batch, case.q_heads, case.length, case.head_dim)
    kv_shape = (case.batch, case.kv_heads, case.length, case.head_dim)
    query, key, value, grad_out = (torch.randn(s) for s in (q_shape, kv_shape, kv_shape, q_shape))
    found = correctness.reference(case, (query, key, value, grad_out), with_grads=True)

    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    group = case.q_heads // case.kv_heads
    spread = [leaves[0], *(leaf.repeat_interleave(group, 1) for leaf in leaves[1:])]
    index = [torch.arange(n) for n in q_shape[:3]] + [torch.arange(case.length)]
    b, h, q_idx, kv_idx = torch.meshgrid(*index, indexing="ij")
    scores = spread[0] @ spread[1].mT / math.sqrt(case.head_dim)
    if score_mod := make_score_mod(case, "cpu"):
        scores = score_mod(scores, b, h, q_idx, kv_idx)
    if mask_mod := make_mask_mod(case, "cpu"):
        scores = scores.masked_fill(~mask_mod(b, h, q_idx, kv_idx), -math.inf)
    out = torch.softmax(scores, -1) @ spread[2]
    grads = torch.autograd.grad(out, leaves, grad_out.double())
    results = dict(zip(correctness.NAMES, (out, *grads), strict=True))
    for name_of, tensor in correctness.cut(case, results).items():
        torch.testing.assert_close(found[name_of], tensor)


def test_budget_accepts_the_peer_and_refuses_nan_and_thrice_the_peer():
    case, rounding = BY_NAME["causal-8k-d128"], {"out": 0.001}
    assert correctness.misses(case, {"out": 0.01}, {"out": 0.01}, rounding) == []
    assert correctness.misses(case, {"out": 0.03}, {"out": 0.01}, rounding)
    wrong = correctness.largest_errors(
        {"out": torch.zeros(2).double()}, {"out": torch.tensor([0.0, math.nan]).double()}
    )
    assert correctness.misses(case, wrong, {"out": 0.01}, rounding)


def test_table_and_geometric_mean():
    results = [
        {
            "case": name,
            "shape": "(1,1,1,1,1)",
            "area": 10**9,
            "head_dim": 128,
            "milliseconds": {"fwd": {"flexhop": [1.0, 1.0, 9.0], "in-tree": [peer] * 3}},
            "first_call": {"flexhop": 1.5},
            "failed": {},
        }
        for name, peer in (("a", 2.0), ("b", 8.0))
    ]
    assert report.tflops(results[0], "fwd", "flexhop") == pytest.approx(512.0)
    text = report.markdown(results, "a machine", ("flexhop", "in-tree"))
    assert "| a | (1,1,1,1,1) | 512 | 256 | 2.00 |" in text
    assert "| geometric mean |  |  |  | 4.00 |" in text
    assert "Backward" not in text


@pytest.mark.slow
def test_the_program_runs_on_a_cpu(tmp_path: Path):
    command = "-m benchmarks --device cpu --cases causal-2k --workers 1 --rounds 3 --peers in-tree"
    result = subprocess.run(
        [python(*INDUCTOR), *command.split(), "--json", str(tmp_path / "numbers.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "causal-2k-d128" in result.stdout
    assert (tmp_path / "numbers.json").exists()


@pytest.mark.slow
def test_a_random_problem_is_compared_on_a_cpu():
    command = "-m benchmarks.drawn --device cpu --procs 1 --minutes 1 --only 13 4"
    result = subprocess.run(
        [python(*INDUCTOR), *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    row = next(line for line in result.stdout.splitlines() if line.startswith("| 13 |"))
    *_, forward, _, backward, _, difference, _ = (cell.strip() for cell in row.split("|"))
    assert float(forward) > 0 and backward == "–"
    assert float(difference) < 0.01
    assert "fwd: 1 problems" in result.stdout
    assert "in-tree failed: 4 (2,2,2,128,64)" in result.stdout


@pytest.mark.parametrize(("sizes", "queries"), [("short", 512), ("decode", 1)])
def test_random_problems_of_other_sizes(sizes: str, queries: int):
    shapes = [drawn.draw(number, sizes=sizes).shape for number in range(100)]
    assert max(shape.q_len for shape in shapes) == queries
    assert {shape.kv_len for shape in shapes} == {*drawn.LENGTHS[sizes]}


@pytest.mark.parametrize(
    ("name", "part"),
    [("batch-8", 1.0), ("causal", 1.0), ("window-16k", 0.5), ("sinks", 17 / 64), ("chosen", 0.25)],
)
def test_bytes_are_those_of_the_keys_that_are_seen(name: str, part: float):
    step = next(step for step in decoding.STEPS if step.name == name).shrunk()
    (tensors,) = decoding.make_tensors(step, torch.device("cpu"))
    scores = decoding.scores_of(step, tensors)
    whole = 2 * 4 * step.batch * step.kv_heads * step.keys * step.head_dim
    assert decoding.seen_bytes(step, tensors, scores) == part * whole


MODDED = [step for step in decoding.STEPS if step.sees != "all" or step.score != "none"]


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("step", MODDED, ids=lambda step: step.name)
def test_steps_with_mods_are_checked_by_their_definition(step: decoding_cases.Step):
    step = replace(step.shrunk(), queries=min(step.queries, 40))
    (tensors,) = decoding.make_tensors(step, torch.device("cpu"))
    scores = decoding.scores_of(step, tensors)
    plain = decoding.scores_of(replace(step, sees="all", score="none"), tensors)
    sees_all = step.sees == "causal" and step.queries == 1
    assert torch.equal(scores, plain) == sees_all
    exact = torch.softmax(scores, -1) @ tensors[2][-1, -1].double()
    with torch.compiler.set_stance("force_eager"):
        attention = decoding.build("flexhop", step, torch.device("cpu"))
        assert attention is not None
        assert decoding.largest_error(exact, attention(*tensors)) < 1e-5


def test_a_decoding_table():
    result = {
        "name": "a", "shape": "(1,1,1,1,1,1)", "bytes": 4_000_000_000,
        "microseconds": {"flexhop": 1000.0, "cudnn": 2000.0}, "failed": {"flash": "why"},
    }  # fmt: skip
    text = report.decoding_table([result], ("flexhop", "cudnn", "flash"))
    assert "| a | (1,1,1,1,1,1) | 1000.0 | 2000.0 | – | 4000 | 2000 | – | 2.00 | – |" in text
    assert "- a, flash: why" in text


@pytest.mark.slow
def test_the_decoding_program_runs_on_a_cpu(tmp_path: Path):
    command = "-m benchmarks.decoding --device cpu --steps ^alibi --peers flash"
    result = subprocess.run(
        [python(*INDUCTOR), *command.split(), "--json", str(tmp_path / "numbers.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| alibi |" in result.stdout
    assert (tmp_path / "numbers.json").exists()


PACKS = {pack.name: pack for pack in varlen_cases.PACKS}


@pytest.mark.parametrize("name", PACKS)
def test_packs_fill_their_tokens(name: str):
    pack = PACKS[name]
    sizes = varlen_cases.lengths(pack)
    assert sum(sizes) == pack.tokens and min(sizes) > 0
    parts = [part.tokens for part in varlen_worker.checked_parts(pack)]
    assert parts[0].start == 0 and parts[-1].stop == pack.tokens
    assert len(parts) <= len(sizes)
    assert max(sizes) in {part.stop - part.start for part in parts}


def test_there_are_packs_of_ten_thousand_and_of_one_long_sequence():
    assert len(varlen_cases.lengths(PACKS["short-10k"])) >= 9_000
    long, *short = sorted(varlen_cases.lengths(PACKS["skewed-16k"]), reverse=True)
    assert long == 12 << 10 and len(short) > 16


def test_a_wrong_packed_result_is_refused():
    pack = varlen_cases.Pack("a", 24, 8, "equal", 2, 8)
    tensors = varlen_worker.make_tensors(pack, torch.device("cpu"))
    parts = varlen_worker.checked_parts(pack)
    exact = [varlen_worker.exact_sequence(pack, tensors, part) for part in parts]
    for factor, is_right in ((1.0, True), (1.01, False)):
        found = {
            name: torch.cat([right[name] for right in exact])[:, None].float() * factor
            for name in exact[0]
        }
        errors = {"flexhop": varlen_worker.errors_of(exact, parts, found)}
        assert (varlen_worker.misses(errors, exact, torch.float32) == []) == is_right


def test_a_table_of_packs():
    result = {
        "name": "a", "tokens": 1000, "sequences": 3, "scores": 10**9, "head_dim": 128,
        "milliseconds": {"fwd": {"flexhop": 1.0, "in-tree": 1.5}}, "failed": {},
    }  # fmt: skip
    text = varlen.table([result], ("flexhop", "in-tree", "flash"), "fwd")
    assert "| a | 3 | 1000 | 1.000 | 1.500 | – | 512 | 1000.0 | 1.50 | – |" in text


@pytest.mark.slow
def test_the_program_of_packed_sequences_runs_on_a_cpu(tmp_path: Path):
    command = "-m benchmarks.varlen --device cpu --rows ^equal-1k --peers dense"
    result = subprocess.run(
        [python(*INDUCTOR), *command.split(), "--json", str(tmp_path / "numbers.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| equal-1k |" in result.stdout
    assert (tmp_path / "numbers.json").exists()


STEP_NAMES = {step.name for step in derivatives.STEPS}


def test_every_must_reads_steps_that_are_measured():
    """With numbers for all steps, no ratio is missing."""
    numbers = {"ms": 2.0, "mib": 4.0, "ours": 1.0, "plain": 2.0, "grad": 70.0, "no grad": 30.0}
    found = {name: dict(numbers) for name in STEP_NAMES}
    for name in STEP_NAMES:
        found[name]["ms"] = 0.5 if "forward" in name else 8.0 if "math" in name else 2.0
    cells = {must.what: must.cells(found) for must in derivatives.MUSTS}
    assert all("–" not in row for row in cells.values())
    assert cells["tangent / forward, 4k"][1:] == ["4.00", "<= 4", "yes"]
    assert cells["compiled math / flexhop, 4k tangent"][1:] == ["4.00", ">= 6", "NO"]
    backward = cells["second, fused / backward, 2x4k-64"]
    assert backward[1:] == ["1.33", "<= 6", "yes"]  # 2.0 over 2.0 - 0.5
    assert cells["us above the compiled code, slopes, grad"][1:] == ["70.00", "<= 60", "NO"]
    assert cells["largest error / math's in the same dtype"][1] == "0.50"


def test_a_must_whose_steps_failed_is_not_reached():
    assert all(must.cells({})[1::2] == ["–", "–"] for must in derivatives.MUSTS)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
@pytest.mark.parametrize(
    ("name", "derivative", "has_kernels"),
    [
        ("2x4k-64", derivatives_worker.second, True),
        ("2x4k-64-slopes", derivatives_worker.second, True),
        ("2x4k-64-computed", derivatives_worker.flow, True),
        ("2x4k-64-capped", derivatives_worker.second, True),
        ("2x4k-64-chunks", derivatives_worker.flow, False),
        ("4k", derivatives_worker.detached, False),
    ],
)
def test_which_second_orders_have_kernels(
    name: str, derivative: Any, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
):
    orders: list[int] = []

    def note(args: Any, formula: Any) -> Any:
        orders.append(len(args.program))
        return lower_definition(args, formula)

    monkeypatch.setattr(derivative_lowering, "lower_definition", note)
    problem = replace(derivatives.PROBLEMS[name], batch=1, heads=2, tokens=64)
    setting = derivatives_worker.Setting(problem, "cpu")
    run = derivative(setting.flexible())
    is_chunked = problem.in_chunks
    with derivatives_worker.in_chunks() if is_chunked else contextlib.nullcontext():
        generated = generate_code(run, setting.inputs(), setting.inputs())
    functions = {name for kernel in generated.templates for name in kernel.functions}
    assert ("push_grad_query_blocks" in functions) == has_kernels
    assert orders == [2] * is_chunked


@pytest.mark.slow
def test_the_program_of_derivatives_runs_on_a_cpu(tmp_path: Path):
    path = tmp_path / "numbers.json"
    command = (
        "-m benchmarks.derivatives --device cpu --at-once 2 --only ^4k-64.tangent|slopes.host"
    )
    result = subprocess.run(
        [python(*INDUCTOR), *command.split(), "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| 4k-64 | tangent | flexhop |" in result.stdout
    assert "| slopes, no grad |" in result.stdout
    numbers = json.loads(path.read_text())
    assert numbers["4k-64 tangent flexhop"]["ours"] < 1e-5
    assert 0 < numbers["slopes host flexhop"]["code, grad"]


def test_steps_are_innermost_loops_with_products():
    step = ".L_1:\n HGMMA R0 ;\n MUFU.EX2 R1 ;\n MUFU.EX2 R2 ;\n FADD R1 ;\n BRA .L_1 ;"
    tiles = f".L_0:\n MOV R2 ;\n{step}\n BRA .L_0 ;"
    wait = ".L_2:\n HGMMA R0 ;\n SYNCS ;\n BRA .L_2 ;"
    masked = step.replace("FADD", "FSEL R3 ;\n FADD").replace("L_1", "L_3")
    assert steps.innermost([tiles, masked, step, wait]) == [step, masked]
    assert list(map(steps.count, (step, masked))) == [5, 6]

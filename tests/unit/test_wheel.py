"""The built wheel holds everything that flexhop needs at run time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="building a wheel needs hatchling (group dev)")

ROOT = Path(__file__).resolve().parents[2]
READ_TEMPLATE = """
import importlib.resources, pathlib, sys
sys.path.insert(0, sys.argv[1])
import flexhop.templates
folder = pathlib.Path(str(importlib.resources.files(flexhop.templates)))
assert str(folder).startswith(sys.argv[1]), folder
print(*sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*.jinja")))
assert all(entry.read_text() for entry in folder.rglob("*.jinja"))
assert importlib.resources.files("flexhop").joinpath("py.typed").is_file()
"""


USE = """
import flexhop, torch
query = torch.randn(1, 2, 32, 16)
out = flexhop.flex_attention(query, query, query)
print(flexhop.__file__, flexhop.__version__, out.shape == query.shape)
"""


def run_python(
    *arguments: str, folder: Path = ROOT, python: str = sys.executable, **environment: str
) -> str:
    command, variables = [python, *arguments], os.environ | environment
    if python != sys.executable:
        variables.pop("PYTHONPATH", None)  # names this checkout
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=variables
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The freshly built wheel, as `python -m build` makes it."""
    wheels = tmp_path_factory.mktemp("wheels")
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels))
    (built,) = wheels.glob("flexhop-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed, alone."""
    target = tmp_path_factory.mktemp("installed")
    run_python(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    )
    return target


@pytest.mark.slow
def test_templates_are_read_from_the_installed_wheel(installed: Path):
    in_wheel = run_python("-c", READ_TEMPLATE, str(installed), folder=installed).split()
    folder = ROOT / "flexhop" / "templates"
    in_tree = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jinja"))
    assert in_wheel == in_tree
    assert in_tree


@pytest.mark.slow
def test_wheel_holds_the_package_only(installed: Path):
    folders = {path.name for path in installed.iterdir() if path.is_dir()}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"flexhop"}


@pytest.mark.slow
def test_it_installs_beside_the_torch_that_is_there(wheel: Path, tmp_path: Path):
    """Small, and satisfied by this PyTorch, of CUDA or not: nothing else is asked for."""
    assert wheel.stat().st_size < 1_000_000
    run_python("-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ours, theirs = (run_python("-c", where, python=p).strip() for p in (sys.executable, python))
    Path(theirs, "torch.pth").write_text(ours + "\n")  # its packages, but not this checkout
    pip = "-m", "pip", "install", "--quiet", "--no-index"
    report = tmp_path / "report.json"
    run_python(*pip, "--dry-run", "--report", str(report), str(wheel), python=python)
    asked = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert asked <= {"flexhop"}
    run_python(*pip, "--force-reinstall", "--no-deps", str(wheel), python=python)
    found = run_python("-W", "ignore", "-c", USE, folder=tmp_path, python=python).split()
    assert Path(found[0]).is_relative_to(theirs)
    assert found[1:] == [wheel.name.split("-")[1], "True"]


IMPORT_TIMES = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import flexhop
print(middle - start, time.process_time() - middle)
"""


def test_import_adds_little_to_that_of_torch(tmp_path: Path):
    """0.15 s where `import torch` takes 1.3 s; three times that here, beside other processes."""
    environment = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    ratios: list[float] = []
    for _ in range(4):  # the first compiles to bytecode
        torch_took, flexhop_took = map(
            float, run_python("-c", IMPORT_TIMES, **environment).split()
        )
        ratios.append(flexhop_took / torch_took)
    assert min(ratios[1:]) < 0.35


TYPED = """
import torch
from torch import Tensor
import flexhop
from flexhop import AuxRequest, BlockMask, KernelOptions, PagedAttention, flex_attention
from flexhop.masks import causal, sliding_window
from flexhop.mods import alibi, alibi_slopes
from flexhop.nn import Attention


def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + (q_idx - kv_idx)


query = torch.randn(1, 4, 64, 16)
mask: BlockMask = flexhop.create_block_mask(causal, None, None, 64, 64, "cpu")
out: Tensor = flex_attention(query, query, query, score_mod, mask)
pair = flex_attention(query, query, query, alibi(alibi_slopes(4)), return_aux=AuxRequest(lse=True))
lse: Tensor | None = pair[1].lse
options = KernelOptions(deterministic=True)
out = flex_attention(query, query, query, block_mask=mask, kernel_options=options)
compiled = torch.compile(flex_attention)
module = Attention(width=64, heads=4)
hidden: Tensor = module(torch.randn(1, 64, 64), block_mask=mask)
window = flexhop.and_masks(causal, sliding_window(8))
paged = PagedAttention(n_pages=4, page_size=16, max_batch_size=1, device="cpu")
report = flexhop.explain(query, query, query)
print(report.forward.kernel, mask.sparsity() + 1, out.shape, lse, hidden, window, compiled, paged)
"""


@pytest.mark.slow
def test_a_program_of_a_user_is_typed(installed: Path, tmp_path: Path):
    """pyright reads the installed package as users have it."""
    pytest.importorskip("pyright", reason="needs pyright (group dev)")
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    settings = {"extraPaths": [str(installed)], "typeCheckingMode": "strict"}
    # Libraries beside ours, torch among them, have unknown types that we cannot mend.
    unknown = ("Unknown" + kind for kind in ("MemberType", "VariableType", "ArgumentType"))
    settings |= {f"report{name}": False for name in unknown}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run_python("-W", "ignore", str(program))  # and it runs

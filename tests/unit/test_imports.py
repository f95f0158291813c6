"""What `import flexhop` brings in, in a fresh interpreter, and who may know private PyTorch."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from flexhop.compat import check_torch_version
from flexhop.errors import TorchVersionWarning
from tests.programs import run_code

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "scripts" / "check_private_imports.py"


# From 2.15 on, PyTorch's own module of block masks imports SymPy; ours are such masks.
OWN = "import torch.nn.attention.flex_attention; own = {'sympy'} & {*sys.modules}"


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_import_is_light():
    """Dynamo, Inductor and Triton cost seconds; they wait until somebody compiles."""
    heavy = ("torch._dynamo", "torch._inductor", "triton", "sympy")
    code = f"""
import sys
{OWN}
import flexhop
print([m for m in {heavy} if m in sys.modules and m not in own])
"""
    result = run_code(code)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_calls_on_a_cpu_compile_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch, flexhop
def attend(query):
    return flexhop.flex_attention(query, query, query)
query = torch.randn(1, 2, 40, 16)
found = torch.compile(attend, fullgraph=True)(query)
torch.testing.assert_close(found, attend(query), atol=1e-5, rtol=1e-5)
"""
    result = run_code(code)
    assert result.returncode == 0, result.stderr


def test_masks_of_a_process_that_compiles_nothing_are_light():
    """Dynamo takes more than a second, SymPy a third of one."""
    code = f"""
import sys, torch
{OWN}
import flexhop
ids = torch.arange(512) // 100
masks = {{
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 100),
    "documents": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
    "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0),
    "blocks": lambda b, h, q, k: (k // 64 % 4 == 0) | ((q // 64 - k // 64).abs() <= 1),
}}
for name, mask_mod in masks.items():
    flexhop.create_block_mask(mask_mod, None, None, 512, 512, "cpu")
    print(*(m for m in ("torch._dynamo", "sympy") if m in sys.modules and m not in own))
"""
    result = run_code(code)
    assert (result.stdout.strip(), result.returncode) == ("", 0), result.stderr


@pytest.mark.parametrize(
    "first",
    [
        "flexhop",
        "torch._dynamo",
        "torch.utils.flop_counter",
        "flexhop.compat.dynamo.calls",
        "flexhop.compat.dynamo.others",
    ],
)
def test_the_order_of_imports_does_not_matter(first: str):
    """Dynamo and the counter of operations learn of the operators when they are imported."""
    code = f"""
import {first}, torch, flexhop, sys
from torch.utils.flop_counter import flop_registry
query = torch.randn(1, 2, 32, 16)
compiled = torch.compile(flexhop.flex_attention, backend="eager", fullgraph=True)
assert torch.allclose(compiled(query, query, query), flexhop.flex_attention(query, query, query))
counted = flexhop.ops.forward.attention in flop_registry
print(counted, torch._dynamo.__spec__.loader.__class__.__module__)
"""
    result = run_code("import warnings; warnings.simplefilter('ignore')\n" + code)
    assert result.stdout.split() == ["True", "_frozen_importlib_external"], result.stderr


def test_the_readme_of_compat_says_what_is_imported():
    """Every file is named once, and those that `import flexhop` loads are marked."""
    folder = ROOT / "flexhop" / "compat"
    named: dict[str, list[str]] = {"import": [], "use": []}
    for section in (folder / "README.md").read_text().split("## ")[1:]:
        room = re.match(r"\w+/|", section)[0].replace("/", ".")
        for names, loaded_by in re.findall(r"^\| (`.*?) \| (\w+) \|", section, re.M):
            named[loaded_by] += [room + name for name in re.findall(r"`(\w+)\.py`", names)]
    files = sorted(
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if path.stem != "__init__"
    )
    assert sorted(named["import"] + named["use"]) == files
    code = (
        "import sys, flexhop; print(*(m for m in sys.modules if m.startswith('flexhop.compat.')))"
    )
    loaded = run_code(code).stdout.split()
    modules = {name.removeprefix("flexhop.compat.") for name in loaded}
    assert sorted(named["import"]) == sorted(modules & {*files})


def test_import_is_silent():
    code = "import warnings; warnings.filterwarnings('error', '', UserWarning, 'flexhop')"
    result = run_code(code + "; import flexhop")
    assert (result.stdout, result.returncode) == ("", 0), result.stderr


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("2.10.1", False), ("2.11.0+cu130", True), ("2.15.0", True), ("2.16.0.dev2026", False)],
)
def test_the_version_of_torch_is_checked(
    version: str, is_supported: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_torch_version()
    expected = f"flexhop supports torch 2.11 to 2.15, but this is {version}; it may not work."
    assert [str(w.message) for w in caught] == ([] if is_supported else [expected])
    assert all(w.category is TorchVersionWarning for w in caught)


def test_import_warns_of_an_unknown_torch():
    code = "import torch, warnings; warnings.simplefilter('always'); torch.__version__ = '2.99.0'"
    result = run_code(code + "; import flexhop")
    assert "TorchVersionWarning: flexhop supports torch 2.11 to 2.15" in result.stderr
    assert result.returncode == 0


def test_private_torch_lives_in_compat_only():
    result = run_python(str(CHECK))
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "line",
    [
        "import torch._inductor.config",
        "from torch import _dynamo",
        "from torch._higher_order_ops import flex_attention",
        "def f():\n    import torch\n    return torch._C._cuda_getDevice()",
    ],
)
def test_the_check_finds_private_torch(line: str, tmp_path: Path):
    offender = tmp_path / "offender.py"
    offender.write_text(line + "\n")
    code = (
        f"import sys; sys.path.insert(0, {str(CHECK.parent)!r});"
        f"from check_private_imports import private_uses;"
        f"print(len(private_uses(open({str(offender)!r}).read())))"
    )
    assert int(run_python("-c", code).stdout) > 0

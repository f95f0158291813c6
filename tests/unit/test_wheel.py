"""The built wheel holds everything that flexhop needs at run time."""

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


def run_python(*arguments: str, folder: Path = ROOT) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the freshly built wheel was installed, alone."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels))
    (wheel,) = wheels.glob("flexhop-*.whl")
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

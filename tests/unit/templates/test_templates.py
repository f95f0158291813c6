"""Templates are Python with holes, and their constants are the fields of their dataclass."""

import ast
import builtins
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import torch

from flexhop.lowering.hopper import add_order, bits, latent
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.hopper import forward as hopper
from flexhop.lowering.portable import head_lists, kernels
from flexhop.lowering.portable.constants import DecodeCombineConstants
from flexhop.lowering.problem import Cache
from flexhop.options import KernelOptions, Tile
from flexhop.templates import hopper as hopper_text
from flexhop.templates import part, portable
from flexhop.templates.hopper import records
from tests.problems import problem

FOLDER = Path(kernels.__file__).parents[2] / "templates"
PARTS = sorted(
    file.relative_to(FOLDER).as_posix().removesuffix(".py.jinja")
    for file in FOLDER.rglob("*.py.jinja")
)
HOLES = {
    "def_kernel", "size", "stride", "gen_argdefs", "gen_defines", "store_output", "modification",
    "scatter_sites", "draw_kept", "dropped", "output_pointer", "start_sums", "add_captured",
    "finish_captured", "add_sites", "finish_sites", "row_sums", "copied_pairs",
}  # fmt: skip
# Names that the generated file imports.
IMPORTED = {"tl", "triton", "libdevice"}
GLUON = {
    "tl", "gl", "gluon", "tma", "mbarrier", "fence_async_shared", "add_async", "load_async",
    "as_parts", "in_flight", "read_kept", "specialize_warps", "stash", "unstash",
    "store_async", "warpgroup_mma", "warpgroup_mma_wait", *records.__all__,
}  # fmt: skip

EXTRAS, CAPTURED = portable.EXTRAS, hopper_text.CAPTURED
EXTRA_FILES = tuple(f"mods/{extra}" for extra in EXTRAS)
KERNELS = (
    *portable.KERNELS,
    *hopper_text.BEFORE,
    *(f"hopper_{name}" for name in hopper_text.KERNELS),
)


def source(kernel: str, extras: tuple[str, ...] = ()) -> str:
    """Text of a kernel, and of further files that some calls need."""
    if kernel in portable.KERNELS:
        text = portable.source(kernel)
    elif kernel in hopper_text.BEFORE:
        text = hopper_text.source_before(kernel)
    else:
        extras = extras or (hopper_text.PAIRS if kernel == "hopper_forward" else ())
        return hopper_text.source(kernel.removeprefix("hopper_"), extras)
    return text + "".join(map(part, extras))


# Kernels that read a cache, and which they are otherwise.
CACHED = {
    "cached_forward": "forward", "cached_decode": "decode", "cached_wide_decode": "decode",
}  # fmt: skip

# The parts of templates/printers/row_sums.py.
ROW_SUMS = {
    "start": "\nsums = ()", "also": ", sums", "take": "sums = ", "keep": "\nreturn sums",
    "add": "\nadd_row_sums(ARGUMENTS, sums)", "finish": "pass",
}  # fmt: skip
# What stands in the holes below.
STUBS = {"ARGUMENTS", "OUT"}


@pytest.mark.parametrize("name", PARTS)
def test_fields_have_names(name: str):
    """Tuples are read by field: a position with an underscore would change with each new field."""
    assert re.findall(r"^\s*_,.*$|^.*\b_, _\b.*$", part(name), re.M) == []


@pytest.mark.parametrize("name", PARTS)
def test_comments_leave_no_trace(name: str):
    """Comments for readers of a template change neither kernels nor the keys of caches."""
    body = re.sub(r"\A\{#-.*?-#\}\n", "", part(name), flags=re.S)  # the head of a kernel
    comments = re.findall(r"^[^\n]*\{#.*?#\}[^\n]*$", body, re.M | re.S)
    own_lines = re.compile(r" +\{# .*? -#\}", re.S)
    assert [comment for comment in comments if not own_lines.fullmatch(comment)] == []


def _def_kernel(*names: str) -> str:
    return f"@triton.jit\ndef kernel({', '.join(names)}):"


def _stride(name: str | None, axis: int | None = None) -> str:
    if axis is not None:
        return "1"
    return "1, 1, 1" if (name or "").endswith("NUM_BLOCKS") else "1, 1, 1, 1"


def _modification(subgraph_number: int, output_name: str, **inputs: str) -> str:
    return f"{output_name} = ({', '.join(inputs.values())})"


def _store_output(indices: tuple[str, ...], value: str, mask: str, **_: object) -> str:
    return f"tl.store({' + '.join(indices)}, {value}, mask={mask})"


def _indented(text: str, width: int = 0) -> str:
    return text.replace("\n", "\n" + "    " * width)


def rendered(text: str, *, sums: bool = False) -> str:
    """A template with stubs in its holes; sums: with those of rows."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["indent_except_first"] = _indented
    body = environment.from_string(text).render(
        def_kernel=_def_kernel,
        size=lambda name, axis: "1",
        stride=_stride,
        gen_argdefs=lambda: "ARGUMENTS",
        gen_defines=lambda: "",
        store_output=_store_output,
        modification=_modification,
        scatter_sites=lambda *more: "pass",
        row_sums=lambda part, *rows: ROW_SUMS[part] if sums or part == "finish" else "",
        draw_kept=lambda q_idx, kv_idx: "",
        dropped=lambda value: value,
        output_pointer=lambda: "OUT",
        start_sums=lambda: "()",
        add_captured=lambda: "",
        finish_captured=lambda: "",
        add_sites=lambda: "pass",
        finish_sites=lambda: "pass",
        copied_pairs=lambda part: "OUT" if part == "pointer" else "1",
    )
    imports = "import triton\nimport triton.language as tl\n"
    if "@gluon.jit" in text:
        used = sorted(name for name in GLUON if name in text)
        imports = f"from gluon import {', '.join(used)}\n"
        body = body.replace("@triton.jit", "@gluon.jit")
    return f"{imports}\n{body}"


def _free_names(text: str) -> set[str]:
    """Names that are read somewhere and bound nowhere in the scope that reads them."""
    tree = ast.parse(text)
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    free: set[str] = set()
    for function in functions.values():
        names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
        bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        bound |= {a.arg for a in function.args.args}
        free |= {n.id for n in names if isinstance(n.ctx, ast.Load)} - bound
    return free - set(functions) - IMPORTED - GLUON - set(dir(builtins)) - STUBS


def _constants(kernel: str) -> set[str]:
    classes = {
        "hopper_forward": hopper.HopperForwardConstants,
        "hopper_latent": latent.LatentConstants,
        "hopper_latent_paged": latent.LatentConstants,
        "hopper_backward": hopper_grad.HopperBackwardConstants,
        "mask_bits": bits.MaskBitsConstants,
        "add_order": add_order.AddOrderConstants,
        "head_lists": head_lists.HeadListsConstants,
    }
    if kernel in classes:
        return {field.name for field in dataclasses.fields(classes[kernel])}
    tile = Tile(64, 64)
    if kernel == "decode_combine":
        return {f.name for f in dataclasses.fields(DecodeCombineConstants)}
    cache = Cache(16, torch.int8, torch.int8) if kernel in CACHED else None
    of = problem(head_dim=576 if "wide_" in kernel else 64, cache=cache)
    # Its launches write one gradient each.
    alone = {"jvp_grad_key_value": "jvp_grad_key", "wide_grad_key_value": "grad_key"}
    name = (CACHED | alone).get(kernel, kernel).removeprefix("wide_")
    return set(kernels.constants(name, of, KernelOptions(), tile))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PARTS)
def test_only_expression_holes(name):
    text = part(name)
    assert "{%" not in text, "templates have no control tags"
    used = set(re.findall(r"{{-?\s*(\w+)", text))
    assert used <= HOLES


@pytest.mark.parametrize("name", [name for name in PARTS if "@gluon.jit" in part(name)])
def test_constants_of_gluon_kernels_are_global(name):
    """Triton visits every line of a function, once for each kind of arguments."""
    assert "gen_defines" not in part(name)


@pytest.mark.parametrize("name", PARTS)
def test_first_line_says_what_a_program_does(name):
    if "def_kernel" in part(name):
        assert part(name).startswith("{#- One program: ")
        assert "Grid: " in part(name).partition("-#}")[0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_constants_are_the_fields_of_the_dataclass(kernel):
    assert _free_names(rendered(source(kernel))) == _constants(kernel)


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_some_calls_need_reads_no_constants(extra):
    assert _free_names(rendered(part(f"mods/{extra}"))) == set()


def test_gradients_of_captured_tensors_read_no_other_constants():
    text = rendered(source("hopper_backward", CAPTURED))
    assert _free_names(text) == _constants("hopper_backward")


@pytest.mark.parametrize("kernel", ["grad_query", "grad_key_value"])
def test_sums_of_rows_read_no_other_constants(kernel):
    text = rendered(source(kernel, ("mods/row_sums",)), sums=True)
    assert text.count("sums = tile_grad(") == text.count("    add_row_sums(") == 1
    assert _free_names(text) == _constants(kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_function_has_a_docstring(kernel):
    tree = ast.parse(rendered(source(kernel, (*EXTRA_FILES, *CAPTURED))))
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name != "kernel"]
    assert functions
    assert [f.name for f in functions if not ast.get_docstring(f)] == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_ruff_finds_only_constants(kernel, tmp_path):
    ruff = shutil.which("ruff", path=Path(sys.executable).parent) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("needs ruff, which is not installed")
    file = tmp_path / f"{kernel}.py"
    file.write_text(rendered(source(kernel)))
    command = [
        ruff,
        "check",
        "--isolated",
        "--select",
        "F,B",
        "--output-format",
        "json",
        str(file),
    ]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    undefined = {re.findall(r"`(\w+)`", f["message"])[0] for f in found if f["code"] == "F821"}
    others = [
        f"{f['code']} line {f['location']['row']}: {f['message']}"
        for f in found
        if f["code"] != "F821"
    ]
    # Strides that one kernel of two needs are unpacked together.
    assert [line for line in others if "stride_" not in line] == []
    assert undefined - STUBS == _constants(kernel)


def test_each_user_function_is_called_by_its_argument_names():
    for kernel in KERNELS:
        if kernel in ("decode_combine", "add_order", "head_lists"):
            continue  # they have no scores
        functions = {
            f.name: f
            for f in ast.parse(rendered(source(kernel))).body
            if isinstance(f, ast.FunctionDef)
        }
        score = [a.arg for a in functions["score_mod"].args.args]
        names = ["ARGUMENTS", "score", "b", "h", "q_idx", "kv_idx", "distance", "pairs"]
        assert score == names
        assert [a.arg for a in functions["mask_mod"].args.args] == [
            "ARGUMENTS",
            "b",
            "h",
            "q_idx",
            "kv_idx",
        ]

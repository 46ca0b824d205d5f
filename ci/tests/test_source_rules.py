"""Hold every source file to the rules of the house: import direction, launches, types, no hosts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROOMS_IT_MAY_IMPORT = {
    "oracles": {"oracles"},
    "kernels": {"oracles", "kernels"},
    "conformance": {"oracles", "kernels", "conformance"},
    "ci": {"oracles", "kernels", "conformance", "ci"},
    "accuracy": {"accuracy"},
}

# The one command line of all rooms hands `draftproof accuracy` and `draftproof history` on.
FRONTS = {("conformance/cli.py", "accuracy"), ("conformance/cli.py", "ci")}

OUR_MODULE = re.compile(r"draftproof\.(\w+)(\.\w+)*(:\w+)?")


def room_files(room: str) -> list[Path]:
    """Python files of a room that ship, tests apart."""
    return [path for path in sorted((ROOT / room).rglob("*.py")) if "tests" not in path.parts]


def tracked_texts() -> dict[str, str]:
    """Every text file of the checkout that git tracks or would track, by its path."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    texts = {}
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix not in {".safetensors", ".png", ".gz"}:
            texts[name] = path.read_text()
    return texts


def imported_modules(source: str, package: str) -> set[str]:
    """Modules that a source imports: plain, relative to `package`, or named in a string."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(parents + ([node.module] if node.module else []))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and OUR_MODULE.fullmatch(node.value)
        ):
            found.add(node.value.split(":")[0])
    return found


def imported_rooms(source: str, package: str) -> set[str]:
    """Rooms of draftproof that a source imports, bare names included."""
    rooms = set()
    for module in imported_modules(source, package):
        parts = module.split(".")
        if parts[0] == "draftproof" and len(parts) > 1:
            rooms.add(parts[1])
        elif parts[0] in ROOMS_IT_MAY_IMPORT:
            rooms.add(f"bare {parts[0]}")
    return rooms


@pytest.mark.parametrize(
    "source",
    [
        "import draftproof.kernels.c128_cleanup",
        "from draftproof import kernels",
        "from draftproof.kernels import c128_cleanup",
        "from .. import kernels",
        "from ..kernels import c128_cleanup",
        "import importlib; importlib.import_module('draftproof.kernels.c128_cleanup')",
        "__import__('draftproof.kernels')",
        "ENTRY = 'draftproof.kernels.c128_cleanup:c128_cleanup'",
        "def late():\n    from draftproof.kernels.runtime import INTERPRETED",
    ],
)
def test_every_way_of_importing_a_room_is_seen(source: str) -> None:
    assert "kernels" in imported_rooms(source, "draftproof.oracles")


def test_a_bare_import_of_a_room_is_seen() -> None:
    assert imported_rooms("import kernels.runtime", "draftproof.ci") == {"bare kernels"}


@pytest.mark.parametrize("room", ROOMS_IT_MAY_IMPORT)
def test_imports_point_one_way(room: str) -> None:
    files = room_files(room)
    assert files, f"no source found in {room}/"
    wrong = []
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        package = ".".join(["draftproof", *path.parent.relative_to(ROOT).parts])
        for other in imported_rooms(path.read_text(), package) - ROOMS_IT_MAY_IMPORT[room]:
            if other in {*ROOMS_IT_MAY_IMPORT, *(f"bare {r}" for r in ROOMS_IT_MAY_IMPORT)}:
                wrong += [] if (name, other) in FRONTS else [f"{name} imports {other}"]
    assert not wrong, wrong


def test_oracles_import_nothing_but_torch_and_the_standard_library() -> None:
    allowed = {"draftproof", "torch", *sys.stdlib_module_names}
    wrong = [
        f"{path.name} imports {module}"
        for path in room_files("oracles")
        for module in imported_modules(path.read_text(), "draftproof.oracles")
        if module.split(".")[0] not in allowed
    ]
    assert not wrong, wrong


def test_importing_every_oracle_loads_no_triton() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "import draftproof.oracles as oracles\n"
        "import torch\n"
        "assert 'triton' not in sys.modules, 'torch alone loads triton'\n"
        "names = [m.name for m in pkgutil.walk_packages(oracles.__path__, 'draftproof.oracles.')]\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "    assert 'triton' not in sys.modules, f'{name} loads triton'\n"
        "print(len(names))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "ci", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


def is_triton_jit(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether one of a function's decorators is triton.jit, bare or called."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def launches(tree: ast.AST) -> list[ast.Call]:
    """Calls of the form kernel[grid](...), Triton's way to launch."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]


KERNEL_TREES = {path: ast.parse(path.read_text()) for path in room_files("kernels")}
LAUNCHING_FILES = [path for path, tree in KERNEL_TREES.items() if launches(tree)]


def stated_options(call: ast.Call, constants: dict[str, set[str]]) -> set[str]:
    """Keywords of a launch, those of a module's constant dict (`**LAUNCH`) included."""
    options: set[str] = set()
    for keyword in call.keywords:
        options |= (
            {keyword.arg} if keyword.arg else constants.get(ast.unparse(keyword.value), set())
        )
    return options


def constant_dicts(tree: ast.Module) -> dict[str, set[str]]:
    """Keys of every dict that a module assigns to a name, by that name."""
    return {
        target.id: {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }


def unstated_fp_fusion(tree: ast.Module) -> list[int]:
    """Lines of the launches that leave enable_fp_fusion to Triton's changing default.

    What Triton has compiled already has no choice left: its launch is written compiled[grid](...).
    """
    constants = constant_dicts(tree)
    return [
        call.lineno
        for call in launches(tree)
        if "enable_fp_fusion" not in stated_options(call, constants)
        and ast.unparse(call.func.value) != "compiled"  # type: ignore[attr-defined]
    ]


def test_a_launch_without_enable_fp_fusion_is_seen() -> None:
    source = (
        "LAUNCH = {'num_warps': 1, 'enable_fp_fusion': False}\n"
        "FAST = {'num_warps': 1}\n"
        "kernel[(1,)](x, num_warps=1, enable_fp_fusion=False)\n"
        "kernel[(1,)](x, **LAUNCH)\n"
        "kernel[grid](x, num_warps=1)\n"
        "kernel[grid](x, **FAST)\n"
        "kernel[grid](x, **unknown)\n"
    )
    assert unstated_fp_fusion(ast.parse(source)) == [5, 6, 7]


def test_every_launch_states_enable_fp_fusion() -> None:
    if not LAUNCHING_FILES:
        pytest.skip("no kernel is launched in kernels/ yet")
    wrong = [
        f"{path.name}:{line}"
        for path in LAUNCHING_FILES
        for line in unstated_fp_fusion(KERNEL_TREES[path])
    ]
    assert not wrong, f"launches that do not state enable_fp_fusion: {wrong}"


def test_every_file_that_launches_a_kernel_is_held_by_a_spec_and_a_crosscheck() -> None:
    if not LAUNCHING_FILES:
        pytest.skip("no kernel is launched in kernels/ yet")
    missing = [
        f"{room}/{path.name}"
        for path in LAUNCHING_FILES
        for room in (
            "oracles",
            "conformance/ops",
            "conformance/crosscheck",
            "conformance/mutants",
        )
        if not (ROOT / room / path.name).is_file()
    ]
    assert not missing, f"kernels that nothing checks: {missing}"


def test_every_op_has_a_spec_of_its_name() -> None:
    specified = {path.stem for path in room_files("conformance/ops")} - {"__init__"}
    helpers = {"__init__", "mxfp8", "numerics", "runtime"}
    for room in ("oracles", "kernels"):
        unknown = {path.stem for path in room_files(room)} - specified - helpers
        assert not unknown, f"files of {room}/ without a spec in conformance/ops/: {unknown}"


def untyped_functions(tree: ast.AST) -> list[str]:
    """Functions, Triton's apart, that leave an argument or what they return without a type."""
    untyped = []
    for function in functions(tree):
        if is_triton_jit(function):
            continue
        spec = function.args
        arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or function.returns is None:
            untyped.append(function.name)
    return untyped


def test_an_untyped_function_is_seen() -> None:
    source = "@triton.jit\ndef k(x_ptr): ...\ndef f(x) -> None: ...\ndef g(x: int): ...\n"
    assert untyped_functions(ast.parse(source)) == ["f", "g"]


@pytest.mark.parametrize("room", ROOMS_IT_MAY_IMPORT)
def test_every_function_but_a_kernel_is_typed(room: str) -> None:
    wrong = {
        path.relative_to(ROOT).as_posix(): untyped
        for path in room_files(room)
        if path.parent.name != "mutants"  # they take an op's arguments as they come
        if (untyped := untyped_functions(ast.parse(path.read_text())))
    }
    assert not wrong, wrong


TOLERANCES = re.compile(r"\b(?:[ar]tol|all[c]lose|is[c]lose|assert_[c]lose|approx)\b")


@pytest.mark.parametrize("room", ["oracles", "kernels", "conformance"])
def test_no_check_of_an_op_knows_a_tolerance(room: str) -> None:
    wrong = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None) or ""
            name = name or getattr(node, "arg", None) or ""
            if TOLERANCES.fullmatch(name):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')} {name}")
    assert not wrong, wrong


# Hosts that a reader may be sent to, and hosts of a machine's own.
KNOWN_HOSTS = {
    "127.0.0.1",
    "localhost",
    "www.apache.org",
    "json-schema.org",
    "server.example",
    "docs.github.com",
    # Named by the errors of PyTorch that records hold.
    "docs.pytorch.org",
}
URL_HOST = re.compile(r"\b\w+://(?:[^\s/@\"'`]*@)?([\w.-]+)")


def foreign_hosts(text: str) -> set[str]:
    return {
        host
        for host in URL_HOST.findall(text)
        if host not in KNOWN_HOSTS and not host.endswith(".example") and "." in host
    }


def test_a_registry_host_in_a_text_is_seen() -> None:
    host = ".".join(["wheels", "registry", "test"])
    assert foreign_hosts(f"pip install --index-url https://{host}/whl/cpu x") == {host}
    assert not foreign_hosts("see http://127.0.0.1:30000 and http://localhost/")


def test_no_file_names_a_host_outside_the_known_ones() -> None:
    found = {name: foreign_hosts(text) for name, text in tracked_texts().items()}
    found = {name: hosts for name, hosts in found.items() if hosts}
    assert not found, found


def test_no_file_names_a_path_of_the_machine_it_was_made_on() -> None:
    own = {str(ROOT), str(Path.home()), os.path.realpath(sys.base_prefix)} - {"/", "/usr"}
    private = re.compile(r"(?<![\w./~-])/(?:home|Users|root|work)/\w")
    wrong = [
        f"{name}: {line.strip()[:80]}"
        for name, text in tracked_texts().items()
        for line in text.splitlines()
        if private.search(line) or any(re.search(re.escape(p) + r"(?!\w)", line) for p in own)
    ]
    assert not wrong, wrong


# Rooms inside conformance that must not know those which build on them.
INNER = {
    "engine": {"authoring", "ops", "mutants", "crosscheck", "bench", "ranks", "gate", "published"},
    "authoring": {"ops", "mutants", "crosscheck"},
    "crosscheck": {"ops", "mutants"},
}
# They look into the packages of ops and mutants, and name no op.
FINDERS = {"registry.py", "seals.py"}


@pytest.mark.parametrize("inner", INNER)
def test_inside_conformance_too_imports_point_one_way(inner: str) -> None:
    files = sorted((ROOT / "conformance" / inner).rglob("*.py"))
    assert files, f"no source found in conformance/{inner}/"
    wrong = []
    for path in files:
        package = f"draftproof.conformance.{inner}"
        for module in imported_modules(path.read_text(), package):
            parts = module.split(".")
            if path.name in FINDERS and len(parts) == 3:
                continue
            if parts[:2] == ["draftproof", "conformance"] and set(parts[2:3]) & INNER[inner]:
                wrong.append(f"{path.name} imports {module}")
    assert not wrong, wrong


MERGE_MARKER = re.compile(r"^(<{7} |={7}$|>{7} )", re.MULTILINE)


def test_a_merge_marker_in_a_text_is_seen() -> None:
    assert MERGE_MARKER.search("one\n" + "<" * 7 + " HEAD\ntwo\n")
    assert not MERGE_MARKER.search("=" * 8 + "\nof a heading\n")


def test_no_file_holds_a_merge_that_was_not_ended() -> None:
    wrong = [name for name, text in tracked_texts().items() if MERGE_MARKER.search(text)]
    assert not wrong, wrong

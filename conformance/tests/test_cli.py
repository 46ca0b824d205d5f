"""The command line and the plugin, run as a user runs them: from another folder, in a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftproof.conformance.engine import casefile
from draftproof.conformance.engine.implementations import probe
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.running import case_seed
from draftproof.conformance.tests import harm_kernel, harm_spec

OP = "c128_cleanup"
SHIM = """
from draftproof.oracles.c128_cleanup import c128_cleanup as right

def c128_cleanup(states, req_pool_indices, seq_lens, accept_lens, *, ring_size, num_draft_tokens):
    {fault}
    right(states, req_pool_indices, seq_lens, accept_lens, ring_size=ring_size,
          num_draft_tokens=num_draft_tokens)
"""


def environment() -> dict[str, str]:
    """This process's, less what pytest and the interpreter put there."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "DRAFTPROOF"))
        and name not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")
    }


def draftproof(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "draftproof.conformance.cli", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def plugin(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin, as a reader would from a folder of their own."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "draftproof.conformance.plugin"),
            # One worker: what is tested is that there is one, and each costs a start.
            *("--pyargs", "draftproof.conformance", f"--dp-op={OP}", "-n1", *arguments),
        ],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def implementation(folder: Path, fault: str = "pass") -> Path:
    """A reader's file: the right thing, and one fault."""
    path = folder / "mine.py"
    path.write_text(SHIM.format(fault=fault))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    """The results of a JSON report."""
    document = json.loads(path.read_text())
    assert document["schema"] == "draftproof.verify/1"
    assert document["environment"]["torch"]
    return document["results"]


BAD_USE: list[tuple[list[str], list[str]]] = [
    (["verify", "--op", "nonsense"], ["--op nonsense", "no such op", OP]),
    (["verify", "--impl", "missing.py"], ["--impl missing.py", "no such file"]),
    (["verify", "--impl", "no_such_module"], ["no module named 'no_such_module'", "triton"]),
    (["verify", "--impl", "json:nothing"], ["json has no attribute 'nothing'"]),
    (["verify", "--impl", "empty.py"], ["empty.py", "defines none of the ops", OP]),
    (["verify", "--impl", "broken.py"], ["broken.py", "SyntaxError"]),
    (["verify", "--impl", "raises.py"], ["raises.py", "RuntimeError: no device"]),
    (["verify", "--impl", "number.py"], ["number.py", "c128_cleanup is a int"]),
    (["verify", "--profile", "huge"], ["huge", "quick"]),
    (["verify", "--json", "no/such/folder.json"], ["--json no/such/folder.json"]),
    (["verify", "--html", "no/such/page.html"], ["--html no/such/page.html"]),
    (["verify", "--nonsense"], ["--nonsense"]),
    (["history", "missing"], ["missing: not a folder"]),
    (["verify", "--check", "nonsense"], ["--check nonsense", "no such check", "eager"]),
    (["verify", "--jobs", "0"], ["--jobs 0", "at least 1"]),
    (["verify", "--timeout", "0"], ["--timeout 0", "more than 0 s"]),
    (["verify", "--known", "missing.toml"], ["--known missing.toml", "no such file"]),
    (["verify", "--known", "empty.py", "--known", "broken.py"], ["broken.py", "not TOML"]),
    (["known", "missing.json"], ["missing.json", "no such file"]),
    (["known", "empty.py"], ["empty.py", "not a report"]),
    (["replay", "nothing.json"], ["nothing.json", "no such file"]),
    (["replay", "empty.py"], ["empty.py", "not JSON"]),
    (["mutants", "--op", "nonsense"], ["--op nonsense"]),
    (["golden", "check", "--op", "nonsense"], ["--op nonsense"]),
    (["bench", "--op", "nonsense"], ["--op nonsense"]),
    (["frobnicate"], ["frobnicate"]),
]

EVERY_BAD_USE = """
import contextlib, io, json, sys
from draftproof.conformance.cli import main
found = []
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    found.append([code, said.getvalue()])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit code and output of every bad use, one after another in one process."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.py").write_text("")
    (folder / "broken.py").write_text("def c128_cleanup(:\n")
    (folder / "raises.py").write_text("raise RuntimeError('no device')\n")
    (folder / "number.py").write_text("c128_cleanup = 3\n")
    done = subprocess.run(
        [sys.executable, "-c", EVERY_BAD_USE, json.dumps([use for use, _ in BAD_USE])],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(BAD_USE)), ids=lambda n: "_".join(BAD_USE[n][0]))
def test_bad_use_is_one_clear_line_and_exit_2(number: int, answers: list[tuple[int, str]]) -> None:
    code, said = answers[number]
    assert code == 2, said
    lines = [line for line in said.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in BAD_USE[number][1])


def test_list_names_every_op_and_what_can_run(tmp_path: Path) -> None:
    done = draftproof("list", folder=tmp_path)
    assert done.returncode == 0
    assert all(name in done.stdout for name in load_specs())
    assert "here: " in done.stdout


def test_without_a_gpu_the_process_that_hands_out_checks_never_loads_torch(tmp_path: Path) -> None:
    program = """
import os, sys
from unittest import mock
from draftproof.conformance.cli import main
try:
    # Whatever this machine has: nothing in /dev that leads to a GPU.
    with mock.patch("os.listdir", lambda folder=".": []), mock.patch("os.cpu_count", lambda: 2):
        main(sys.argv[1:])
except SystemExit as end:
    print("exit", end.code, "torch" in sys.modules, "triton" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "verify", "--op", OP, "--impl", "oracle", "--json", "r"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1] == "exit 0 False False", done.stdout + done.stderr
    assert {line["status"] for line in results(tmp_path / "r")} == {"passed", "skipped"}


def test_verify_counts_what_an_implementation_lacks_and_fails_if_nothing_was_compared(
    tmp_path: Path,
) -> None:
    (tmp_path / "other.py").write_text("def draft_argmax(**args): pass\n")
    report = tmp_path / "report.json"
    done = draftproof(
        "verify", "--op", OP, "--impl", "other.py", "--json", str(report), folder=tmp_path
    )
    assert done.returncode == 1, done.stdout
    assert "nothing was compared" in done.stdout
    assert [(line["op"], line["status"]) for line in results(report)] == [(OP, "not_provided")]


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and results, by check and case, of a file that does its process every harm."""
    folder = tmp_path_factory.mktemp("harm")
    for module in (harm_spec, harm_kernel):
        shutil.copy(module.__file__, folder)
    done = draftproof(
        *("verify", "--spec", "harm_spec.py", "--impl", "harm_kernel.py"),
        *(
            "--check=eager",
            "--check=guards",
            "--check=poison",
            "--jobs=1",
            "--timeout=2",
            "--json=report.json",
        ),
        folder=folder,
    )
    found = results(folder / "report.json")
    assert len({(line["check"], line["case"]) for line in found}) == len(found)
    return done.returncode, {f"{line['check']}/{line['case']}": line for line in found}


@pytest.mark.parametrize("case", harm_spec.TIMEOUTS)
def test_a_hang_is_one_failed_line(case: str, harmed: tuple[int, dict[str, Any]]) -> None:
    line = harmed[1][f"{'eager' if case == 'hangs' else 'guards'}/{case}"]
    assert (line["status"], line["ended"]) == ("failed", "timeout")
    said = "could not be interrupted" if case == "blocks" else "did not end within 2 s"
    assert said in line["detail"]
    assert "last seen at" in line["detail"]
    assert "harm_kernel.py:" in line["detail"]


@pytest.mark.parametrize("case", harm_spec.CRASHES)
def test_a_lost_process_is_one_failed_line(case: str, harmed: tuple[int, dict[str, Any]]) -> None:
    line = harmed[1][f"eager/{case}"]
    assert (line["status"], line["ended"]) == ("failed", "crash")
    assert "the process that ran it crashed" in line["detail"]


@pytest.mark.parametrize("case", harm_spec.RAISES)
def test_an_implementation_cannot_skip_or_end_its_own_check(
    case: str, harmed: tuple[int, dict[str, Any]]
) -> None:
    line = harmed[1][f"eager/{case}"]
    assert (line["status"], line["ended"]) == ("failed", "")
    assert "a legal call raised" in line["detail"]


@pytest.mark.parametrize("case", ["fine", "fine_after_all", *harm_spec.HARMLESS])
def test_what_a_call_does_to_its_process_costs_no_other_line(
    case: str, harmed: tuple[int, dict[str, Any]]
) -> None:
    line = harmed[1][f"eager/{case}"]
    # Torch's inference mode cannot be left from outside: it costs the process, and its own line.
    assert line["status"] == ("failed" if case == "modes" else "passed"), line["detail"]


def test_an_op_that_keeps_hanging_in_a_check_is_not_run_to_the_end_of_this_check_alone(
    harmed: tuple[int, dict[str, Any]],
) -> None:
    code, found = harmed
    assert code == 1
    slept = [found[f"poison/sleeps_{number}"] for number in range(4)]
    assert sorted(line["status"] for line in slept) == ["failed"] * 3 + ["skipped"]
    why = [line["detail"] for line in slept if line["status"] == "skipped"]
    assert why == ["not run: 3 cases of doubled/poison ran out of time before"]


def test_known_differences_are_written_from_a_report_and_do_not_fail_a_run_that_has_them(
    tmp_path: Path,
) -> None:
    kernel = Path(harm_kernel.__file__).read_text()
    (tmp_path / "wrong.py").write_text(
        kernel.replace("out.copy_(x + x)", "out.copy_(x if harm[:4] == 'fine' else x + x)")
    )
    shutil.copy(harm_spec.__file__, tmp_path)
    run = (
        *("verify", "--spec", "harm_spec.py", "--impl", "wrong.py", "--jobs=1", "--timeout=20"),
        *("--check=fuzz", "--check=invalid", "--json=report.json"),
    )
    failed = draftproof(*run, folder=tmp_path)
    assert failed.returncode == 1, failed.stdout
    written = draftproof("known", "report.json", "--write", "known.toml", folder=tmp_path)
    assert written.returncode == 0, written.stderr
    assert "known.toml: 1 entries" in written.stdout
    assert draftproof("known", "report.json", "--write", "known.toml", folder=tmp_path).returncode
    listed = draftproof(*run, "--known=known.toml", "--fail-fast", folder=tmp_path)
    assert listed.returncode == 0, listed.stdout
    assert "known 1, out[i] is 2 * x[i]: doubled/fuzz" in listed.stdout
    found = {line["check"]: line for line in results(tmp_path / "report.json")}
    assert (found["fuzz"]["status"], found["fuzz"]["known"]) == ("failed", "out[i] is 2 * x[i]")
    # The file must hold: what passes, or is not there at all, fails the run.
    text = (tmp_path / "known.toml").read_text()
    more = text.replace('"fuzz"', '"invalid"').replace('"hypothesis"', '["too_short", "gone"]')
    (tmp_path / "known.toml").write_text(text + more)
    strict = draftproof(*run, "--known=known.toml", folder=tmp_path)
    assert strict.returncode == 1, strict.stdout
    assert "doubled/invalid/too_short passes, and is listed" in strict.stdout
    assert "gone matches nothing" in strict.stdout


def test_a_neighbour_imported_inside_a_call_is_found(tmp_path: Path) -> None:
    (tmp_path / "next_door.py").write_text("")
    path = implementation(tmp_path, "import next_door")
    done = plugin("--dp-impl", str(path), "-k", "eager and ring_of_one", folder=Path.home())
    assert done.returncode == 0, done.stdout


def test_noise_and_threads_at_import_do_no_harm(tmp_path: Path) -> None:
    path = implementation(tmp_path)
    path.write_text(
        "import os, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "sys.stdout.write('no newline'); sys.stdout.flush(); os.write(1, b'\\xff\\xfe')\n"
        + path.read_text()
    )
    found = probe(str(path))
    assert (list(found.ops), found.problem) == ([OP], None)


def test_the_plugin_leaves_the_folder_s_own_conftest_and_options_alone(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --mine=yes\n")
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--mine')\n"
        "def pytest_configure(config):\n"
        "    Path(__file__).with_name('seen').write_text(config.getoption('--mine'))\n"
    )
    path = implementation(tmp_path)
    done = plugin("--dp-impl", str(path), "-k", "eager and ring_of_100", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "seen").read_text() == "yes"


def test_the_plugin_does_nothing_in_a_run_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import os, sys\n"
        "def test_nothing_was_set_or_imported():\n"
        "    assert 'TRITON_INTERPRET' not in os.environ\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "draftproof.conformance.plugin", str(tmp_path)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_triton_loaded_in_the_wrong_mode_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import triton\n")
    done = plugin("-p", "early", "--dp-device=cpu", folder=tmp_path)
    assert done.returncode == 4
    assert "triton was imported in compiled mode before this run" in done.stderr


def test_a_failure_writes_a_case_file_that_replays_on_any_implementation(tmp_path: Path) -> None:
    path = implementation(tmp_path, "accept_lens = accept_lens + 1")
    only = ("-k", "eager and ring_of_100", "--dp-json=run.json", "--dp-html=run.html")
    done = plugin("--dp-impl", str(path), *only, folder=tmp_path)
    assert done.returncode == 1
    # Through a worker, as all code from outside runs.
    (result,) = json.loads((tmp_path / "run.json").read_text())["results"]
    assert result["places"][0]["pictures"]
    assert '<svg class="picture"' in (tmp_path / "run.html").read_text()
    line = next(line for line in done.stdout.splitlines() if "draftproof replay" in line)
    case = line.split("draftproof replay ")[1].split(" --impl")[0]
    assert draftproof("replay", case, "--impl", str(path), folder=tmp_path).returncode == 1
    good = draftproof("replay", case, folder=tmp_path)
    assert good.returncode == 0, good.stdout
    assert "passed" in good.stdout


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_truncated_case_file_is_one_clear_line_and_exit_2(suffix: str, tmp_path: Path) -> None:
    spec = load_specs()[OP]
    call = spec.build(spec.bad_input_params, case_seed(0, "x"))
    path = casefile.write(tmp_path / "case.json", casefile.CaseFile(OP, "eager", "x", [call]))
    victim = path.with_suffix(suffix)
    victim.write_bytes(victim.read_bytes()[:-40])
    done = draftproof("replay", str(path), folder=tmp_path)
    assert done.returncode == 2
    assert len((done.stdout + done.stderr).splitlines()) == 1


def test_verify_and_pytest_run_the_same_checks(tmp_path: Path) -> None:
    from draftproof.conformance.engine.session import Settings, jobs

    listed = plugin("--collect-only", "-q", folder=tmp_path).stdout
    names = {line.split("::test_op[")[1].rstrip("]") for line in listed.splitlines() if "[" in line}
    settings = Settings("triton", (OP,), "cpu", "quick", 0, "x")
    assert names == {job.id for job in jobs(settings)}

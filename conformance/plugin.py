"""The pytest plugin: options `--dp-*`, one test item per (op, check, case), and the report.

Load it with `-p draftproof.conformance.plugin`. It acts only in runs that ask for the conformance
suite; in others it does nothing but offer its options.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

ON_DEMAND = ("tests", "test_mutants.py", "test_faults.py", "test_bench.py")
"""What `pytest conformance` leaves out unless it is named: the suite's tests of itself, mutants,
faults made by rule and benchmarks."""

ROOMS = ("oracles", "kernels", "conformance", "accuracy", "ci")
"""Folders of a checkout, imported as `draftproof.<room>`."""

GPU_DEVICES = ("nvidia", "nvhost", "nvgpu", "nvmap", "dxg", "kfd")
"""How the files in `/dev` begin through which a process reaches a GPU: NVIDIA's driver, that of its
integrated GPUs, the one of Linux inside Windows, and AMD's."""

PROPERTY = "draftproof"
"""Name of the user property in which a result travels, so that xdist keeps it."""

MUTANT_PROPERTY = "draftproof-mutant"
"""Likewise for what became of a mutant."""

BENCH_PROPERTY = "draftproof-bench"
"""Likewise for a timing."""

FAULT_PROPERTY = "draftproof-fault"
"""Likewise for what became of a fault made by rule."""

_SETTINGS = pytest.StashKey[Any]()
_REPORT = pytest.StashKey[Any]()
_RUNNER = pytest.StashKey[Any]()
_DEVICE = pytest.StashKey[str]()
_ROWS = pytest.StashKey[Any]()
_HUNTER = pytest.StashKey[Any]()
_WATCHDOG = pytest.StashKey[Any]()
_FAULTS = pytest.StashKey[Any]()
_THERE = pytest.StashKey[set[tuple[str, str, str]]]()

_WORKER: dict[str, pytest.Config] = {}
"""In a worker of ours: its configuration."""

LOST_PROCESS = 70
"""Exit code of a worker that gives up by itself."""

pytest.register_assert_rewrite(*(f"draftproof.{room}.tests" for room in ROOMS))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, all prefixed `--dp-`."""
    group = parser.getgroup("draftproof", "draftproof conformance")
    group.addoption(
        "--dp-impl",
        default=None,
        metavar="SPEC",
        help="triton (default), baseline, oracle, sglang, a path to a .py file, or module[:attr]",
    )
    group.addoption(
        "--dp-spec",
        action="append",
        default=None,
        metavar="FILE",
        help="a .py file with ops of your own: an oracle, SPECS, perhaps MUTANTS and VARIANTS",
    )
    group.addoption("--dp-op", action="append", default=None, metavar="NAME", help="only this op")
    group.addoption("--dp-device", default="auto", choices=("auto", "cpu", "cuda"))
    group.addoption("--dp-profile", default="quick", choices=("quick", "full", "soak"))
    group.addoption("--dp-seed", type=int, default=0, metavar="N", help="seed of cases and fuzzing")
    group.addoption("--dp-json", default=None, metavar="FILE", help="write the results as JSON")
    group.addoption("--dp-html", default=None, metavar="FILE", help="write a page of the results")
    group.addoption(
        "--dp-failures",
        default="draftproof-failures",
        metavar="DIR",
        help="folder for case files of failing calls",
    )
    group.addoption(
        "--dp-timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="limit of one check; left out: as the profile has it, for code from outside",
    )
    group.addoption(
        "--dp-check", action="append", default=None, metavar="NAME", help="only this check"
    )
    group.addoption(
        "--dp-jobs",
        type=int,
        default=None,
        metavar="N",
        help="processes to spread the checks over, on a GPU too; left out: by cores and memory "
        "for code from outside",
    )
    group.addoption(
        "--dp-known",
        default=None,
        metavar="FILE",
        help="known differences, which do not fail: a TOML file, or the name of one of ours",
    )
    group.addoption(
        "--dp-faults", default=None, metavar="PLAN", help="plan of a round of faults made by rule"
    )
    group.addoption(
        "--dp-fail-fast", action="store_true", help="end at the first failure that is not known"
    )


# ---------------------------------------------------------------- before Triton is imported


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    """Choose the device and the interpreter, and spread code from outside over workers."""
    options = early_config.known_args_namespace
    if not _is_ours(early_config, args):
        return
    device = choose_device(options.dp_device)
    early_config.stash[_DEVICE] = device
    jobs = options.dp_jobs
    if jobs is not None and jobs < 1:
        raise pytest.UsageError(f"--jobs {jobs}: at least 1 is due")
    if options.dp_timeout is not None and not options.dp_timeout > 0:
        raise pytest.UsageError(f"--timeout {options.dp_timeout:g}: more than 0 s are due")
    outside = _outside(options.dp_impl) or bool(options.dp_spec) or bool(options.dp_faults)
    own = ["--maxfail=1"] if options.dp_fail_fast else []
    if outside or jobs is not None:
        if getattr(options, "numprocesses", None) is None:
            from draftproof.conformance import sizing

            count = jobs if jobs is not None else sizing.workers(device)
            # Code from outside never runs in this process.
            own += ["-n", str(count if outside or count > 1 else 0)]
        if getattr(options, "maxworkerrestart", None) is None:
            # Every crash is one line: xdist must not give up after a few.
            own += ["--max-worker-restart", "1000"]
    args[:] = [*own, *args]


def _is_ours(config: pytest.Config, args: list[str]) -> bool:
    if any(argument.startswith("--dp-") for argument in args):
        return True
    options = config.known_args_namespace
    named = list(options.file_or_dir)
    in_checkout = config.rootpath.resolve() == ROOT
    if not named and in_checkout and config.invocation_params.dir.resolve() == ROOT:
        named = list(config.getini("testpaths"))
    for name in named:
        place = name.split("::")[0]
        if options.pyargs and place.split(".")[:2] == ["draftproof", "conformance"]:
            return True
        path = (config.invocation_params.dir / place).resolve()
        if path.is_relative_to(HERE) or (in_checkout and HERE.is_relative_to(path)):
            return True
    return False


def _outside(name: str | None) -> bool:
    from draftproof.conformance.engine.implementations import is_outside

    return name is not None and is_outside(name)


def _may_have_gpu() -> bool:
    """Whether torch must be asked; a Linux that shows no GPU spares its import."""
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return True
    return any(name.startswith(GPU_DEVICES) for name in os.listdir("/dev"))


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def choose_device(asked: str) -> str:
    """Pick "cpu" or "cuda", and switch the interpreter on where the CPU serves."""
    wanted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    has_cuda = (asked == "cuda" or _may_have_gpu()) and _torch_sees_gpu()
    if asked == "cuda" and not has_cuda:
        raise pytest.UsageError("--device cuda: torch sees no CUDA device here")
    if asked == "cuda" and wanted:
        raise pytest.UsageError("--device cuda: TRITON_INTERPRET is set; unset it to run on a GPU")
    device = "cuda" if asked != "cpu" and has_cuda and not wanted else "cpu"
    triton = sys.modules.get("triton")
    if triton is not None and bool(triton.knobs.runtime.interpret) != (device == "cpu"):
        mode = "compiled" if device == "cpu" else "interpreted"
        raise pytest.UsageError(
            f"triton was imported in {mode} mode before this run could choose the device {device}: "
            "import it later, or set TRITON_INTERPRET to "
            f"{'1' if device == 'cpu' else '0'} before the run"
        )
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return device


# ---------------------------------------------------------------- settings


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Resolve the options of a run that is ours; a worker takes them from its controller."""
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        if "draftproof" in workerinput:
            _WORKER["config"] = config
            from draftproof.conformance.engine.session import Runner, Settings

            settings = Settings.load(workerinput["draftproof"])
            _use_specs(settings.specs)
            config.stash[_SETTINGS] = settings
            config.stash[_RUNNER] = Runner(settings, workerinput["workerid"])
        return
    device = config.stash.get(_DEVICE, None)
    if device is None or config.option.help:
        return
    from draftproof.conformance.engine.session import Report, Runner

    settings = _settings(config, device)
    if not _spread(config):
        _use_specs(settings.specs)
    config.stash[_SETTINGS] = settings
    config.stash[_REPORT] = Report()
    config.stash[_RUNNER] = Runner(settings)


def _faults(settings: Any, worker: str) -> Path:
    """Where a worker's stack is written when it crashes."""
    return Path(settings.scratch) / f"faults-{worker}"


def _use_specs(files: tuple[str, ...]) -> None:
    if not files:
        return
    from draftproof.conformance.engine import registry
    from draftproof.conformance.names import Refused

    try:
        registry.use(files)
    except Refused as error:
        raise pytest.UsageError(str(error)) from error


def _spread(config: pytest.Config) -> bool:
    """Whether the tests run in workers, so that this process need not know them."""
    return bool(getattr(config.option, "numprocesses", None)) and not config.option.collectonly


def _settings(config: pytest.Config, device: str) -> Any:
    from draftproof.conformance.engine.session import Settings
    from draftproof.conformance.names import CHECKS, Refused, surely_an_op

    asked = tuple(dict.fromkeys(config.option.dp_op or ()))
    specs = tuple(config.option.dp_spec or ())
    name = config.option.dp_impl or (None if specs else "triton")
    outside = name is not None and _outside(name)
    provided = None
    known: tuple[str, ...] = ()
    lacking: dict[str, str] = {}
    about: dict[str, Any] = {}
    if outside or specs:
        from draftproof.conformance.engine.implementations import probe

        found = probe(name, specs)
        if found.problem:
            raise pytest.UsageError(found.problem)
        name, known = found.implementation, found.known
        provided, lacking, about = found.ops, found.lacking, found.about
        asked = asked or found.specified
    elif not all(map(surely_an_op, asked)):
        from draftproof.conformance.engine.registry import op_names

        known = op_names()
    for op in asked:
        if known and op not in known:
            raise pytest.UsageError(f"--op {op}: no such op (known: {', '.join(known)})")
    checks = tuple(dict.fromkeys(config.option.dp_check or ()))
    for check in checks:
        if check not in CHECKS:
            raise pytest.UsageError(f"--check {check}: no such check (known: {', '.join(CHECKS)})")
    listed = config.option.dp_known
    if listed is not None:
        from draftproof.conformance.engine import known as differences

        try:
            differences.read(differences.locate(listed))
        except Refused as error:
            raise pytest.UsageError(str(error)) from error
        listed = str(differences.locate(listed).resolve())
    return Settings(
        implementation=str(name),
        ops=asked,
        device=device,
        profile=config.option.dp_profile,
        seed=config.option.dp_seed,
        failures=config.option.dp_failures,
        provided=provided,
        scratch=tempfile.mkdtemp(prefix="draftproof-"),
        specs=specs,
        checks=checks,
        timeout=config.option.dp_timeout,
        known=listed,
        lacking=lacking,
        about=about,
        faults=config.option.dp_faults,
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the settings to an xdist worker."""
    settings = node.config.stash.get(_SETTINGS, None)
    if settings is not None:
        node.workerinput["draftproof"] = settings.dump()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the workers' notes."""
    settings = config.stash.get(_SETTINGS, None)
    if settings is not None:
        # What stays frozen is never freed, and Triton's bindings print pages about that at exit.
        gc.unfreeze()
    if settings is not None and settings.scratch and not hasattr(config, "workerinput"):
        shutil.rmtree(settings.scratch, ignore_errors=True)


def settings_of(config: pytest.Config) -> Any:
    """The settings of a run, or a usage error in a run that is not ours."""
    settings = config.stash.get(_SETTINGS, None)
    if settings is None:
        raise pytest.UsageError("this run does not name draftproof.conformance or a --dp- option")
    return settings


# ---------------------------------------------------------------- collection


def _room_module(path: Path) -> str | None:
    """The import name of a file in a room, or None."""
    if path.suffix != ".py":
        return None
    try:
        parts = path.resolve().relative_to(ROOT).with_suffix("").parts
    except ValueError:
        return None
    if not parts or parts[0] not in ROOMS:
        return None
    return ".".join(("draftproof", *parts))


class RoomModule(pytest.Module):
    """A test file imported under its real name, so that there is one copy of every module."""

    def _getobj(self) -> Any:
        name = _room_module(self.path)
        assert name is not None
        try:
            return importlib.import_module(name)
        except Exception as error:
            raise self.CollectError(f"importing {name} failed: {error!r}") from error


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Import the rooms' test files as `draftproof.<room>.*`."""
    if _room_module(module_path) is not None:
        return RoomModule.from_parent(parent, path=module_path)
    return None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> Any:
    """Keep pytest from importing a room's `__init__.py` under a bare name."""
    if (path / "__init__.py").is_file() and _room_module(path / "__init__.py") is not None:
        return pytest.Dir.from_parent(parent, path=path)
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what `pytest conformance` does not mean, unless it is named."""
    path = collection_path.resolve()
    if path.parent != HERE or path.name not in ON_DEMAND:
        return None
    for argument in config.args:
        named = (config.invocation_params.dir / argument.split("::")[0]).resolve()
        if named.is_relative_to(path):
            return None
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item for every job of the run."""
    if "dp_job" in metafunc.fixturenames:
        from draftproof.conformance.engine.session import jobs

        found = jobs(settings_of(metafunc.config))
        metafunc.parametrize("dp_job", found, ids=[job.id for job in found])
    if "dp_bench" in metafunc.fixturenames:
        from draftproof.conformance.bench.jobs import bench_jobs

        found_bench = bench_jobs(settings_of(metafunc.config))
        metafunc.parametrize("dp_bench", found_bench, ids=[job.id for job in found_bench])
    for name in ("dp_standing", "dp_fault"):
        if name in metafunc.fixturenames:
            from draftproof.conformance.faults import hunt

            settings = settings_of(metafunc.config)
            make = hunt.standing if name == "dp_standing" else hunt.order
            each = make(settings, hunt.Plan.read(settings.faults)) if settings.faults else []
            metafunc.parametrize(name, each, ids=[str(number) for number in range(len(each))])
    if "dp_mutant" in metafunc.fixturenames or "dp_variant" in metafunc.fixturenames:
        from draftproof.conformance.engine.registry import load_mutants
        from draftproof.conformance.names import CHECKS

        ops = settings_of(metafunc.config).chosen()
        mutants, variants = load_mutants()
        if "dp_mutant" in metafunc.fixturenames:
            chosen = [mutant for mutant in mutants if mutant.op in ops]
            names = [f"{mutant.op}-{mutant.name}" for mutant in chosen]
            metafunc.parametrize("dp_mutant", chosen, ids=names)
        else:
            # By check, so that one slow variant is spread over the workers.
            pairs = [
                (variant, check)
                for variant in variants
                if variant.op in ops
                for check in CHECKS
                if check != "invalid"
            ]
            names = [f"{variant.op}-{variant.name}-{check}" for variant, check in pairs]
            metafunc.parametrize("dp_variant", pairs, ids=names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest checks first: a worker that begins one last keeps the others waiting."""
    if config.stash.get(_SETTINGS, None) is not None and hasattr(config, "workerinput"):
        items.sort(key=lambda item: "-fuzz-" not in item.name)


def _job_of(node: str) -> Any:
    from draftproof.conformance.engine.session import Job

    return Job.from_node(node)


# ---------------------------------------------------------------- running


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported out of garbage collection: every graph capture collects in full."""
    _learn_jobs(session.config, [item.nodeid for item in session.items])
    if session.config.stash.get(_SETTINGS, None) is not None:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Learn from a worker which ops there are, and their order."""
    _learn_jobs(node.config, ids)


def _learn_jobs(config: pytest.Config, nodes: Sequence[str]) -> None:
    report = config.stash.get(_REPORT, None)
    if report is None or report.ops:
        return
    jobs = [job for node in nodes if (job := _job_of(node)) is not None]
    report.ops = list(dict.fromkeys(job.op for job in jobs))
    gatherer = config.pluginmanager.get_plugin("draftproof-gatherer")
    if gatherer is not None and gatherer.progress is not None:
        gatherer.progress.total = len(jobs)


@pytest.hookimpl(tryfirst=True)
def pytest_internalerror(excrepr: object) -> None:
    """End a worker in which pytest itself fails: it costs the check that it runs, not the run."""
    config = _WORKER.get("config")
    if config is not None:
        lines = str(excrepr).strip().splitlines()
        config.stash[_RUNNER].note(f"pytest failed in it: {lines[-1] if lines else 'no message'}")
        os._exit(LOST_PROCESS)


@pytest.fixture
def dp_runner(request: pytest.FixtureRequest) -> Any:
    """The runner of this process."""
    settings_of(request.config)
    return request.config.stash[_RUNNER]


@pytest.fixture
def dp_hunter(request: pytest.FixtureRequest) -> Any:
    """What runs a file with faults in this process."""
    stash = request.config.stash
    if _HUNTER not in stash:
        from draftproof.conformance.faults.hunt import Hunter, Plan

        settings = settings_of(request.config)
        worker = getattr(request.config, "workerinput", {"workerid": "main"})["workerid"]
        stash[_HUNTER] = Hunter(settings, Plan.read(settings.faults), worker)
    return stash[_HUNTER]


def leave_lost_process(config: pytest.Config, text: str) -> None:
    """End this worker if a fault has taken its CUDA context, or more, with it; a new one starts."""
    settings = config.stash.get(_SETTINGS, None)
    if settings is None or not hasattr(config, "workerinput"):
        return
    from draftproof.conformance.engine.containment import spoiled

    if what := spoiled():
        config.stash[_RUNNER].note(f"it left the process unusable: {what}\n{text}")
        os._exit(LOST_PROCESS)
    if settings.device != "cuda" or not text:
        return
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        config.stash[_RUNNER].note(f"the CUDA context was lost\n{text}")
        os._exit(LOST_PROCESS)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    """Turn a dead worker into one failed line that says what it was doing."""
    job = _job_of(crashitem)
    config = sched.config
    settings = config.stash.get(_SETTINGS, None)
    if job is None or settings is None:
        return
    from draftproof.conformance.engine import watchdog
    from draftproof.conformance.engine.session import last_note

    worker = report.node.gateway.id
    note = last_note(settings, worker)
    hung = watchdog.was_ended(Path(settings.scratch), worker)
    what = "exceeded its time limit and could not be interrupted" if hung else "crashed"
    detail = (
        f"{job.op} / {job.check} / {job.case}, implementation {settings.implementation}\n"
        f"the process that ran it {what}"
    )
    faults = _faults(settings, worker)
    if faults.is_file() and (where := _crashed_at(faults.read_text(errors="replace"))):
        detail += f", last seen at {where}"
    if note:
        detail += f"\n  {note}"
    detail += (
        f"\n  run again: draftproof verify --op {job.op} --check {job.check} "
        f"--impl {settings.implementation} --profile {settings.profile} --seed {settings.seed}"
    )
    result = _cut_short(config, job, detail, "timeout" if hung else "crash")
    report.longrepr = detail
    report.user_properties = [(PROPERTY, dataclasses.asdict(result))]
    if result.known is not None:
        report.outcome, report.wasxfail = "skipped", result.known


def _crashed_at(stack: str) -> str | None:
    """The innermost line of a stack of faulthandler's that is neither the suite's nor installed."""
    for path, line in re.findall(r'File "([^"]+)", line (\d+)', stack):
        if Path(path).is_file() and not _installed(Path(path)):
            return f"{path}:{line}"
    return None


def _installed(path: Path) -> bool:
    library = Path(os.__file__).parent
    return "site-packages" in path.parts or any(map(path.is_relative_to, (HERE, library)))


def _cut_short(config: pytest.Config, job: Any, detail: str, ended: str) -> Any:
    """The result of a job whose process could not say it; it counts against its op and check."""
    from draftproof.conformance.engine import known
    from draftproof.conformance.engine.session import Result, mark_known, strike

    settings = config.stash[_SETTINGS]
    entries = known.read(settings.known) if settings.known else ()
    name = settings.implementation
    result = Result(job.op, job.check, job.case, name, "failed", detail=detail, ended=ended)
    result = mark_known(result, entries)
    if result.known is None:
        strike(settings, job, ended)
    return result


class Gatherer:
    """Collects results in the controlling process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.progress = _progress(config)
        self.mutants: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []
        self.faults: dict[int, dict[str, Any]] = {}
        self.lost: set[int] = set()
        """By number: what was said of faults, and those whose process ended."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a result from its user property, or make one for a check that never got so far."""
        from draftproof.conformance.engine.session import Result

        properties: list[tuple[str, Any]] = report.user_properties
        if report.when == "call":
            self.mutants += [v for name, v in properties if name == MUTANT_PROPERTY]
            self.timings += [v for name, v in properties if name == BENCH_PROPERTY]
        if numbered := re.search(r"test_faults\.py::\w+\[(\d+)\]$", report.nodeid):
            number = int(numbered[1])
            for name, value in properties:
                if name == FAULT_PROPERTY:
                    self.faults[number] = value
            if report.failed:
                self.lost.add(number)
            return
        job = _job_of(report.nodeid)
        if job is None:
            return
        settings, gathered = self.config.stash[_SETTINGS], self.config.stash[_REPORT]
        found = None
        for name, value in properties:
            # What xdist reports of a crash happened in no phase of a test.
            if name == PROPERTY and report.when not in ("setup", "teardown"):
                found = Result(**value)
        if found is None and report.failed:
            seconds = round(getattr(report, "duration", 0.0), 4)
            name, text = settings.implementation, report.longreprtext
            found = Result(job.op, job.check, job.case, name, "failed", seconds, text)
        if found is not None:
            gathered.results.append(found)
            if self.progress is not None:
                self.progress.show(found)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Write no letter for a check where the line of progress tells."""
        if self.progress is None or _job_of(report.nodeid) is None:
            return None
        category = "xfailed" if hasattr(report, "wasxfail") else str(report.outcome)
        return (category if report.when != "setup" else "", "", "")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Gather results where the reports arrive."""
    config = session.config
    if (workerinput := getattr(config, "workerinput", None)) and _SETTINGS in config.stash:
        # Kept for the report of a crash, in place of pages on the terminal.
        faults = _faults(config.stash[_SETTINGS], workerinput["workerid"])
        config.stash[_FAULTS] = faults.open("w")
        faulthandler.enable(config.stash[_FAULTS])
    if _REPORT not in config.stash:
        return
    config.pluginmanager.register(Gatherer(config), "draftproof-gatherer")
    if _spread(config):
        from draftproof.conformance.engine.watchdog import Watchdog

        config.stash[_WATCHDOG] = Watchdog(Path(config.stash[_SETTINGS].scratch))


def _progress(config: pytest.Config) -> Any:
    """The line that tells how far the run is, for a terminal."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not reporter.isatty or reporter.verbosity > 0:
        return None
    from draftproof.conformance.report import Progress

    return Progress(reporter._tw._file)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Learn from a worker what its specs hold, to judge the file of known differences."""
    there = getattr(node, "workeroutput", {}).get("draftproof-there")
    if there is not None:
        node.config.stash[_THERE] = {tuple(target) for target in there}


def _there(settings: Any) -> set[tuple[str, str, str]]:
    """Everything that the ops and checks of a run could be of, in the largest profile."""
    from draftproof.conformance.engine.session import jobs

    everything = dataclasses.replace(settings, profile="soak", device="cuda")
    found = {(job.op, job.check, job.case) for job in jobs(everything)}
    # On a CPU, where graph is one result.
    return found | {(op, "graph", "every_case") for op, check, _ in found if check == "graph"}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the JSON; a run in which nothing was compared fails."""
    config = session.config
    settings = config.stash.get(_SETTINGS, None)
    output = getattr(config, "workeroutput", None)
    if settings is None:
        return
    if settings.known and output is not None:
        output["draftproof-there"] = sorted(_there(settings))
    if (watchdog := config.stash.get(_WATCHDOG, None)) is not None:
        watchdog.stop()
    report = config.stash.get(_REPORT, None)
    if report is None:
        return
    gatherer = config.pluginmanager.get_plugin("draftproof-gatherer")
    if gatherer is not None and settings.faults:
        _finish_faults(config, gatherer, settings)
        return
    if gatherer is not None and gatherer.timings:
        _finish_bench(session, gatherer.timings, settings)
        return
    if gatherer is not None and gatherer.progress is not None:
        gatherer.progress.clear()
    if not _ran_ops(session):
        return
    if settings.known:
        from draftproof.conformance.engine import known

        there = _there(settings) if not _spread(config) else config.stash.get(_THERE, set())
        report.stale = known.stale(known.read(settings.known), report.results, there)
    if (report.stale or not report.compared) and session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    totals = report.totals()
    if totals["error"] and not totals["failed"]:
        # A fault of our own is not a mismatch.
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    if config.option.dp_json or config.option.dp_html:
        from draftproof.conformance.environment import describe

        document = report.document(settings, describe(settings.device))
        _write(config, document, "verify")


def _write(config: pytest.Config, document: dict[str, Any], kind: str) -> None:
    """Write a run's results as JSON and as a page, where asked."""
    if config.option.dp_json:
        import json

        Path(config.option.dp_json).write_text(json.dumps(document, indent=1) + "\n")
    if config.option.dp_html:
        from draftproof.conformance.pages.page import write

        write(Path(config.option.dp_html), kind, document)


def _finish_bench(session: pytest.Session, timings: list[dict[str, Any]], settings: Any) -> None:
    """Put the arms together; a reach that was missed fails the run."""
    from draftproof.conformance.bench.rows import bench_rows, record

    rows = bench_rows(timings, settings)
    session.config.stash[_ROWS] = rows
    if session.config.option.dp_json or session.config.option.dp_html:
        _write(session.config, record(rows, settings), "bench")
    if any(row.met is False for row in rows) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _finish_faults(config: pytest.Config, gatherer: Gatherer, settings: Any) -> None:
    """Hand what was said of each fault, or of the file as it stands, to the command line."""
    from draftproof.conformance.environment import describe

    about = {
        **describe(settings.device),
        "device_kind": settings.device,
        "profile": settings.profile,
        "seed": settings.seed,
    }
    said = {"environment": about, "said": gatherer.faults, "lost": sorted(gatherer.lost)}
    _write(config, said, "faults")


def _ran_ops(session: pytest.Session) -> bool:
    """Whether the run was meant to hold ops against their contracts."""
    if session.config.option.collectonly:
        return False
    report = session.config.stash[_REPORT]
    if report.results:
        return True
    return any(_job_of(item.nodeid) is not None for item in getattr(session, "items", ()))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """End with the table op x check."""
    report = config.stash.get(_REPORT, None)
    gatherer = config.pluginmanager.get_plugin("draftproof-gatherer")
    if gatherer is not None and gatherer.mutants:
        from draftproof.conformance.report import mutant_lines

        terminalreporter.section("mutants")
        for line in mutant_lines(gatherer.mutants):
            terminalreporter.write_line(line)
    if rows := config.stash.get(_ROWS, None):
        from draftproof.conformance.bench.rows import table_lines

        terminalreporter.section("bench")
        terminalreporter.write_line(table_lines(rows, config.stash[_SETTINGS]))
    if report is None or not report.results:
        return
    from draftproof.conformance.report import summary

    writer = terminalreporter._tw
    terminalreporter.section("draftproof")
    text = summary(
        report, config.stash[_SETTINGS], width=writer.fullwidth, colour=bool(writer.hasmarkup)
    )
    terminalreporter.write_line(text)

"""The `draftproof` command: a thin front over pytest, and the tools for case files."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from draftproof.conformance.names import Refused, surely_an_op

HERE = Path(__file__).resolve().parent

OK, MISMATCH, USAGE, FAULT = 0, 1, 2, 3
"""Exit codes: as it should be; mismatch or nothing compared; bad usage or input; our fault."""

PLUGINS = ("draftproof.conformance.plugin", "xdist.plugin")
"""What the suite's own pytest loads; whatever else is installed stays out of it."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Golden oracles and bit-exact conformance for the kernels of speculative decoding.",
)
golden_app = typer.Typer(no_args_is_help=True, help="Golden vectors: check ours, export them.")
app.add_typer(golden_app, name="golden")


class Device(str, Enum):
    """Where kernels run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Profile(str, Enum):
    """How much is run."""

    QUICK = "quick"
    FULL = "full"
    SOAK = "soak"


OpOption = Annotated[
    list[str] | None,
    typer.Option("--op", metavar="NAME", help="Only this op; may be repeated."),
]
ImplOption = Annotated[
    str | None,
    typer.Option(
        "--impl",
        metavar="SPEC",
        help="triton (default), baseline, oracle, sglang, FILE.py or module[:attr].",
    ),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto: cuda where there is one.")]
ProfileOption = Annotated[Profile, typer.Option("--profile", help="How much is run.")]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of cases and fuzzing.")]
SpecOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--spec", metavar="FILE", help="A .py file with ops of your own; may be repeated."
    ),
]
CheckOption = Annotated[
    list[str] | None,
    typer.Option("--check", metavar="NAME", help="Only this check; may be repeated."),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        metavar="N",
        help="Processes, on a GPU too; left out: by cores and free memory.",
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="S",
        help="Limit of one check, in seconds; left out: as the profile has it, for code from "
        "outside.",
    ),
]
KnownOption = Annotated[
    Path | None,
    typer.Option(
        "--known",
        metavar="FILE",
        help="Known differences (TOML), which do not fail; or the name of a file of ours.",
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the results as JSON."),
]

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the results as one HTML file."),
]


@app.command("list")
def list_command(
    spec: SpecOption = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Ops, contracts, checks, implementations, and what can run here."""
    from rich.console import Console
    from rich.table import Table

    from draftproof.conformance.engine.implementations import PROJECT, PUBLISHED
    from draftproof.conformance.engine.registry import load_mutants, load_specs
    from draftproof.conformance.names import CHECKS

    where = _device(device)
    _use(spec)
    mutants, variants = load_mutants()
    table = Table()
    for column in ("op", "what it does", "contract", "cases", "bad inputs", "mutants", "variants"):
        table.add_column(column, no_wrap=column == "op")
    for op in load_specs().values():
        judges = {type(part.judge).__name__ for effect in op.effects for part in effect.all_parts}
        contract = ", ".join(sorted(judges))
        table.add_row(
            op.name,
            op.summary,
            contract,
            str(len(op.cases)),
            str(len(op.bad_inputs)),
            str(sum(mutant.op == op.name for mutant in mutants)),
            str(sum(variant.op == op.name for variant in variants)),
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    names = ", ".join((*PROJECT, *PUBLISHED))
    console.print(f"implementations: {names}, FILE.py, module[:attr]", markup=False)
    console.print(f"checks: {', '.join(CHECKS)}", markup=False)
    if where == "cuda":
        import torch

        console.print(f"here: {torch.cuda.get_device_name(0)}; every check can run")
    else:
        console.print(
            "here: no CUDA device; kernels run under the Triton interpreter, and the check graph "
            "is skipped"
        )


@app.command()
def verify(
    op: OpOption = None,
    check: CheckOption = None,
    impl: ImplOption = None,
    spec: SpecOption = None,
    device: DeviceOption = Device.AUTO,
    profile: ProfileOption = Profile.QUICK,
    jobs: JobsOption = None,
    timeout: TimeoutOption = None,
    known: KnownOption = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="End at the first failure that is not known.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Name each check as it runs.")
    ] = False,
    seed: SeedOption = 0,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Hold an implementation against the oracles, bit for bit."""
    _writable(json)
    _writable(html, "--html")
    arguments = [
        str(HERE / "test_ops.py"),
        *([f"--dp-impl={impl}"] if impl else []),
        *(f"--dp-spec={file}" for file in spec or ()),
        f"--dp-device={device.value}",
        f"--dp-profile={profile.value}",
        f"--dp-seed={seed}",
        *(f"--dp-op={name}" for name in op or ()),
        *(f"--dp-check={name}" for name in check or ()),
        *([] if timeout is None else [f"--dp-timeout={timeout:g}"]),
        *([f"--dp-known={known}"] if known else []),
        *(["--dp-fail-fast"] if fail_fast else []),
        *([f"--dp-json={json}"] if json else []),
        *([f"--dp-html={html}"] if html else []),
        # Quiet is once already: twice more is one above plain.
        *(["-vv"] if verbose else []),
    ]
    raise typer.Exit(_pytest(arguments, device, jobs))


@app.command()
def known(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="The JSON of a verify run.")],
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="A new file; left out: the terminal."),
    ] = None,
) -> None:
    """List the failures of a run as known differences, for `verify --known`."""
    from draftproof.conformance.engine import known as differences

    document = _verify_report(report)
    entries = differences.of_report(document, _explaining(document))
    text = differences.write(entries)
    if write is None:
        print(text, end="")
        return
    if write.exists():
        raise Refused(f"--write {write}: is there already: name a new file")
    try:
        write.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refused(f"--write {write}: cannot be written ({error.strerror})") from error
    print(f"{write}: {len(entries)} entries; say in each why it differs")


def _explaining(document: Any) -> Any:
    """What tells why published kernels differ, if the report is of such; else nothing does."""
    import importlib

    from draftproof.conformance.engine.implementations import PUBLISHED

    names = {result["implementation"] for result in document["results"]}
    for name in names.intersection(PUBLISHED):
        return importlib.import_module(f"draftproof.conformance.published.{name}_reasons").explain
    return lambda result: None


def _verify_report(path: Path) -> Any:
    """A report of verify, or a refusal."""
    import json

    from draftproof.conformance.engine.session import VERIFY_SCHEMA

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: not a report of verify --json: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != VERIFY_SCHEMA:
        raise Refused(f"{path}: not a report of verify --json ({VERIFY_SCHEMA})")
    return document


@app.command()
def new(
    op: Annotated[str, typer.Argument(metavar="NAME", help="The op's name.")],
) -> None:
    """Write NAME.py here: a spec of your own op that passes as it stands, to change."""
    from draftproof.conformance.authoring.new import write

    path = write(op, Path())
    print(f"{path} written. Try: draftproof verify --spec {path}")


@app.command()
def replay(
    case: Annotated[Path, typer.Argument(metavar="CASE", help="A case file (.json).")],
    impl: ImplOption = None,
    spec: SpecOption = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Run one saved call on any implementation."""
    where = _device(device)
    _use(spec)
    from draftproof.conformance.engine.replay import replay_file

    raise typer.Exit(replay_file(case, impl, where))


@app.command()
def mutants(
    op: OpOption = None,
    spec: SpecOption = None,
    device: DeviceOption = Device.AUTO,
    of: Annotated[
        Path | None,
        typer.Option("--of", metavar="FILE", help="Put single faults into FILE.py by rule."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="S", help="With --of: begin no fault after S seconds."),
    ] = None,
    jobs: JobsOption = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Run wrong implementations, which must be caught, and correct variants, which must pass.

    With --of, the wrong ones are made from FILE, one fault each, and those that no check of the
    quick profile catches are listed.
    """
    if of is not None:
        raise typer.Exit(_faults(of, op, spec, device, budget, jobs, seed, json))
    for option, value in (("--budget", budget), ("--json", json)):
        if value is not None:
            raise Refused(f"mutants {option}: goes with --of FILE")
    if spec:
        from draftproof.conformance.engine.implementations import probe

        found = probe("oracle", [str(file) for file in spec])
        if found.problem:
            raise Refused(found.problem)
        if not set(op or found.specified) & set(found.mutated):
            raise Refused(f"mutants --spec: no mutants of {', '.join(op or found.specified)}")
    arguments = [
        str(HERE / "test_mutants.py"),
        f"--dp-device={device.value}",
        f"--dp-seed={seed}",
        *(f"--dp-spec={file}" for file in spec or ()),
        *(f"--dp-op={name}" for name in op or ()),
    ]
    raise typer.Exit(_pytest(arguments, device, jobs))


def _faults(
    of: Path,
    ops: list[str] | None,
    specs: list[Path] | None,
    device: Device,
    budget: float | None,
    jobs: int | None,
    seed: int,
    json_file: Path | None,
) -> int:
    """Two rounds: the file as it stands, then one fault after the other."""
    import time

    from draftproof.conformance.engine.implementations import probe

    if budget is not None and not budget > 0:
        raise Refused(f"mutants --budget {budget:g}: more than 0 s are due")
    if of.suffix != ".py":
        raise Refused(f"mutants --of {of}: a file ending in .py is due")
    _writable(json_file)
    where = _device(device)
    deadline = None if budget is None else time.monotonic() + budget
    found = probe(str(of), [str(file) for file in specs or ()])
    if found.problem:
        raise Refused(found.problem.replace("--impl", "--of"))
    for name in ops or ():
        if name not in found.ops:
            raise Refused(f"mutants --op {name}: {of} does not define it")
    from draftproof.conformance.faults import hunt

    chosen = tuple(ops or found.ops)
    plan = hunt.Plan(str(of.expanduser().resolve()), chosen)
    with tempfile.TemporaryDirectory(prefix="draftproof-") as folder:

        def round_of(test: str, plan: hunt.Plan) -> dict[str, Any]:
            import json

            written, answer = Path(folder) / "plan.json", Path(folder) / "answer.json"
            plan.write(written)
            answer.unlink(missing_ok=True)
            arguments = [
                f"{HERE / 'test_faults.py'}::{test}",
                *("--tb=no", "--maxschedchunk=1"),
                *(f"--dp-spec={file}" for file in specs or ()),
                f"--dp-device={where}",
                f"--dp-seed={seed}",
                f"--dp-faults={written}",
                f"--dp-json={answer}",
            ]
            code = _pytest(arguments, device, jobs)
            if code not in (OK, MISMATCH) or not answer.is_file():
                raise RuntimeError(f"the round {test} ended with {code}")
            return dict(json.loads(answer.read_text()))

        first = round_of("test_stands", plan)
        said = list(first["said"].values())
        wrong = [one for one in said if one["status"] in ("failed", "error")]
        if wrong or first["lost"]:
            print(*(one["detail"] for one in wrong), sep="\n\n")
            print(f"{of} fails as it stands: {len(wrong) + len(first['lost'])} checks")
            return MISMATCH
        plan = hunt.with_lines(plan, said, deadline)
        second = round_of("test_fault", plan)
    report = hunt.document(plan, seed, second)
    if json_file is not None:
        import json

        json_file.write_text(json.dumps(report, indent=1) + "\n")
    print(*hunt.lines(report), sep="\n")
    return OK if report["totals"]["killed"] + report["totals"]["survived"] else MISMATCH


@app.command()
def audit(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[REPORT]...", help="Reports or folders of them; default: ours."),
    ] = None,
    op: OpOption = None,
    spec: SpecOption = None,
    impl: Annotated[
        str | None, typer.Option("--impl", metavar="NAME", help="Only this one's results.")
    ] = None,
    profile: ProfileOption = Profile.FULL,
    json: JsonOption = None,
) -> None:
    """Say which checks of which cases, of those that a GPU runs, no run has exercised."""
    _writable(json)
    from draftproof.conformance.audit import audit as held
    from draftproof.conformance.audit import due, lines, reports

    documents = reports(places or [HERE.parent / "ci" / "records"])
    expected = due(_ops(op, spec), profile.value, cuda=True)
    report = held(expected, documents, impl)
    if json is not None:
        from json import dumps

        json.write_text(dumps(report, indent=1) + "\n")
    print(*lines(report), sep="\n")
    raise typer.Exit(MISMATCH if report["missing"] else OK)


@golden_app.command("check")
def golden_check(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where they lie; default: ours.")
    ] = None,
    op: OpOption = None,
    spec: SpecOption = None,
) -> None:
    """Hold golden vectors against the oracles and their manifest."""
    ops = _ops(op, spec)
    from draftproof.conformance.engine.vectors import check
    from draftproof.conformance.names import GOLDEN

    if folder is None and spec:
        raise Refused("golden check --spec: name the folder of its vectors, as export was given it")
    raise typer.Exit(check(ops, folder or GOLDEN))


@golden_app.command("export")
def golden_export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    op: OpOption = None,
    spec: SpecOption = None,
) -> None:
    """Write golden vectors: case files with the oracle's outputs, and a manifest."""
    ops = _ops(op, spec)
    from draftproof.conformance.engine.vectors import export

    raise typer.Exit(export(folder, ops))


@app.command()
def bench(
    op: OpOption = None,
    spec: SpecOption = None,
    device: DeviceOption = Device.AUTO,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Time the kernels against their baselines, in one run."""
    _writable(json)
    _writable(html, "--html")
    if html and importlib.util.find_spec("matplotlib") is None:
        raise Refused("bench --html needs matplotlib: pip install 'draftproof[reports]'")
    arguments = [
        str(HERE / "test_bench.py"),
        "-p",
        "pytest_benchmark.plugin",
        "--benchmark-quiet",
        f"--dp-device={device.value}",
        *(f"--dp-spec={file}" for file in spec or ()),
        *(["-n0"] if spec else []),
        *(f"--dp-op={name}" for name in op or ()),
        *([f"--dp-json={json}"] if json else []),
        *([f"--dp-html={html}"] if html else []),
    ]
    raise typer.Exit(_pytest(arguments))


@app.command()
def history(
    records: Annotated[Path, typer.Argument(metavar="RECORDS", help="A folder of JSON records.")],
    html: HtmlOption = None,
) -> None:
    """Conformance and ratios over kept records, by device, and where one fell."""
    _writable(html, "--html")
    from draftproof.ci.history import show

    # A pipe has no width of its own.
    raise typer.Exit(show(records, html, None if sys.stdout.isatty() else 150))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def accuracy(context: typer.Context) -> None:
    """Ask a live server whether the model still answers as well: list, run, compare."""
    try:
        from draftproof.accuracy.cli import app as accuracy_app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("draftproof"):
            raise
        raise Refused(
            f"accuracy needs the package {error.name}: pip install 'draftproof[accuracy]'"
        ) from error
    # Out of standalone mode the inner command line returns the exit code that it was left with.
    code = accuracy_app(context.args, prog_name="draftproof accuracy", standalone_mode=False)
    raise typer.Exit(code or OK)


def _use(files: list[Path] | None) -> tuple[str, ...]:
    """Load spec files into this process; their ops."""
    from draftproof.conformance.engine.registry import use

    return use([str(file) for file in files or ()])


def _ops(names: list[str] | None, files: list[Path] | None = None) -> list[str]:
    """The ops to work on: as asked, else those of the spec files, else ours."""
    if names and not files and all(map(surely_an_op, names)):
        return names
    from draftproof.conformance.engine.registry import op_names

    specified, known = _use(files), op_names()
    for name in names or ():
        if name not in known:
            raise Refused(f"--op {name}: no such op (known: {', '.join(known)})")
    return names or list(specified or known)


def _writable(path: Path | None, option: str = "--json") -> None:
    """Refuse an output file that could not be written, before hours are spent on its content."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise Refused(f"{option} {path}: not a file in an existing folder")
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise Refused(f"{option} {path}: cannot be written ({error.strerror})") from error


def _device(asked: Device) -> str:
    import pytest

    from draftproof.conformance.plugin import choose_device

    try:
        return choose_device(asked.value)
    except pytest.UsageError as error:
        raise Refused(str(error)) from error


def _pytest(arguments: list[str], spread_on: Device | None = None, jobs: int | None = None) -> int:
    """Run the suite's own pytest, apart from the settings of the folder that one stands in.

    With `spread_on`, the checks are spread over processes: `jobs`, or as many as cores and memory
    allow.
    """
    import pytest

    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # Hypothesis would keep a folder where one stands.
    os.environ.setdefault(
        "HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir()) / "draftproof-hypothesis")
    )
    if spread_on is not None:
        from draftproof.conformance import sizing

        where = _device(spread_on)
        jobs = sizing.workers(where) if jobs is None else jobs
        if where == "cpu" and jobs > 1:
            # One thread each: the interpreter's small steps gain nothing from more.
            os.environ["OMP_NUM_THREADS"] = "1"
        arguments = [*arguments, f"--dp-jobs={jobs}"]
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    code = pytest.main(
        [
            *("-c", str(HERE / "verify.ini"), "--rootdir", str(HERE), "--noconftest"),
            *("-q", "--no-header", "--tb=short", "-rN", "--disable-warnings"),
            *plugins,
            *arguments,
        ]
    )
    return {
        pytest.ExitCode.OK: OK,
        pytest.ExitCode.TESTS_FAILED: MISMATCH,
        pytest.ExitCode.NO_TESTS_COLLECTED: MISMATCH,
        pytest.ExitCode.INTERRUPTED: MISMATCH,
        pytest.ExitCode.USAGE_ERROR: USAGE,
    }.get(pytest.ExitCode(code), FAULT)


def _say(message: str) -> None:
    print(f"draftproof: {' '.join(message.split())}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    try:
        code: Any = app(arguments, prog_name="draftproof", standalone_mode=False)
    except Refused as error:
        _say(str(error))
        code = USAGE
    except KeyboardInterrupt:
        _say("interrupted")
        code = 130
    except Exception as error:
        # Typer's usage errors come from click or from its own copy of click.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        _say(str(describe()) or "see --help")
        code = USAGE
    sys.stdout.flush()
    raise SystemExit(int(code or 0))


if __name__ == "__main__":
    main()

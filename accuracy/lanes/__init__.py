"""Accuracy lanes: what is asked, how, how often and by what margin, validated and hashed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console

LANES_DIR = Path(__file__).resolve().parent

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]

# What `--set` may change. A change to anything else (data, prompt, scorer, margin) makes another
# question, not a modified one: it needs a lane file of its own.
_SETTABLE_FIELDS = ("repeats", "concurrency", "dataset.limit")

# Documentation and provenance: they change nothing that is asked, so they stay out of the hash.
_UNHASHED_FIELDS = {"description", "published"}

# Bounds that came after the first lanes: at their default a lane's hash is what it was before.
_LATER_FIELDS = {"timeouts": ("unstreamed_s", "overload_s", "run_s"), "limits": ("odd_ends",)}


class _Section(BaseModel):
    # strict: `max_tokens: "512"` and `repeats: true` are mistakes, not numbers.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Dataset(_Section):
    """Which questions.

    `sha256` is of the source file's bytes; of a generated set, of its rows as JSON lines (see
    `draftproof.accuracy.lanes.rows_sha256`). `prepared_sha256` is of the file that sgl-eval's
    own loader makes of that source, where it makes one. `count` is the number of questions in the
    source, `shots` the number of its first rows used as demonstrations, `scores_shots` whether
    those rows are asked and scored too. `limit` asks only the first so many scored questions.
    `seed` belongs to a generated set.
    """

    kind: Literal["sgl-eval", "jsonl", "generated"]
    name: Name
    sha256: Sha256
    prepared_sha256: Sha256 | None = None
    count: Annotated[int, Field(ge=1)]
    shots: Annotated[int, Field(ge=0)] = 0
    scores_shots: bool = True
    limit: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Dataset:
        if self.shots >= self.count:
            raise ValueError(f"shots: must be fewer than count = {self.count}, got {self.shots}")
        if not self.shots and not self.scores_shots:
            raise ValueError("scores_shots: false needs shots > 0, got shots = 0")
        if (self.kind == "generated") != (self.seed is not None):
            raise ValueError(
                f"seed: a generated set needs one and no other set has one, got {self.seed} "
                f"with kind {self.kind}"
            )
        return self

    @property
    def scored(self) -> int:
        """Number of questions asked and scored, before repeats."""
        available = self.count if self.scores_shots else self.count - self.shots
        return available if self.limit is None else min(self.limit, available)


class Prompt(_Section):
    """How a question becomes a text.

    `sgl-eval`: the prompt file of that name inside sgl-eval; `sha256` is of its bytes.
    `few-shot`: demonstrations, then the question, as raw text; `sha256` is of the demonstrations.
    `template`: `template` with `{problem}` in it; `sha256` is of the template.
    `first_sha256` is of the first scored question's whole text, before any chat template.
    """

    kind: Literal["sgl-eval", "few-shot", "template"]
    name: Name
    sha256: Sha256
    first_sha256: Sha256 | None = None
    template: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Prompt:
        if (self.kind == "template") != (self.template is not None):
            raise ValueError(
                f"template: kind template needs one and no other kind has one, got "
                f"{self.template!r} with kind {self.kind}"
            )
        if self.template is not None:
            if "{problem}" not in self.template:
                raise ValueError(f"template: must contain {{problem}}, got {self.template!r}")
            digest = hashlib.sha256(self.template.encode()).hexdigest()
            if digest != self.sha256:
                raise ValueError(f"sha256: the template's is {digest}, got {self.sha256}")
        return self


class Sampling(_Section):
    """What is sent with each request; a field that is null is not sent.

    Repeat r sends the seed `seed_base + r`. `droppable` names the fields that a server may reject
    without spoiling the protocol (they are then left out, and the receipt says so); every other
    field that is sent is required.
    """

    temperature: Annotated[float, Field(ge=0, le=2)]
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed_base: Annotated[int, Field(ge=0)] | None = None
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    droppable: list[str] = []

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        for field in self.droppable:
            if field not in self.sent:
                raise ValueError(f"droppable: names a field that is not sent, got {field!r}")
        return self

    @property
    def sent(self) -> dict[str, Any]:
        """The fields that are sent, with their values (`seed_base` stands for the seed)."""
        return {
            field: value
            for field, value in self.model_dump().items()
            if field != "droppable" and value is not None
        }

    @property
    def required(self) -> list[str]:
        """The sent fields that a server must accept."""
        return [field for field in self.sent if field not in self.droppable]


class Timeouts(_Section):
    """Seconds, and each has a bound.

    `connect_s` to connect; `idle_s` without content, reasoning or a finish reason on an open stream
    (silence alone ends no request: the server is asked whether it is well first); `unstreamed_s`
    for an answer that is not streamed; `total_s` for any one request; `overload_s` of pauses in
    all for one request that a busy server (429, 503) puts off; `run_s` for the whole run.
    """

    connect_s: Annotated[float, Field(gt=0)] = 10.0
    idle_s: Annotated[float, Field(gt=0)] = 120.0
    unstreamed_s: Annotated[float, Field(gt=0)] = 600.0
    total_s: Annotated[float, Field(gt=0)] = 3600.0
    overload_s: Annotated[float, Field(ge=0)] = 300.0
    run_s: Annotated[float, Field(gt=0)] = 86400.0


class Limits(_Section):
    """How many failed requests, empty answers and odd ends a measurement may contain.

    An odd end is a finish reason other than a stop, a stop word and the limit that was sent.
    """

    errors: Annotated[int, Field(ge=0)] = 0
    empties: Annotated[int, Field(ge=0)] = 0
    odd_ends: Annotated[int, Field(ge=0)] = 0


class Published(_Section):
    """A published figure and the protocol under which it was taken; for the reader only."""

    figure: str
    protocol: str


class Lane(_Section):
    """One protocol for asking a server.

    Attributes
    ----------
    name : str
        Of a modified lane, `<lane>+modified(<field>=<value>,...)`.
    repeats : int
        Responses per question.
    concurrency : int
        Requests in flight.
    margin_pp : float
        Loss of accuracy in percentage points that the lane tolerates.
    scorer : str
        `sgl-eval-math`, `few-shot` or `arithmetic`.
    base, overrides
        Of a modified lane, the lane it was made from and what was changed; no file has them.
    """

    name: str
    description: str
    endpoint: Literal["chat", "generate"]
    dataset: Dataset
    prompt: Prompt
    sampling: Sampling
    repeats: Annotated[int, Field(ge=1)]
    concurrency: Annotated[int, Field(ge=1)]
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    margin_pp: Annotated[float, Field(gt=0, lt=100)]
    scorer: Literal["sgl-eval-math", "few-shot", "arithmetic"]
    published: list[Published] = []
    base: str | None = None
    overrides: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> Lane:
        if (self.prompt.kind == "few-shot") != (self.dataset.shots > 0):
            raise ValueError(
                f"dataset.shots: a few-shot prompt needs them and no other has them, got "
                f"{self.dataset.shots} with prompt kind {self.prompt.kind}"
            )
        if self.endpoint == "generate" and (
            self.sampling.thinking or self.sampling.reasoning_effort
        ):
            raise ValueError("endpoint: thinking and reasoning_effort need chat, got 'generate'")
        if self.repeats > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"repeats: at temperature 0 repeats are copies, not samples, got {self.repeats}"
            )
        return self

    @property
    def is_modified(self) -> bool:
        """Whether `--set` changed it; its figures are then comparable to no published one."""
        return self.base is not None

    @property
    def planned(self) -> int:
        """Number of responses planned: the denominator of every figure."""
        return self.dataset.scored * self.repeats

    @property
    def sha256(self) -> str:
        """SHA-256 over the lane's content as canonical JSON, without its documentation."""
        content = self.model_dump(mode="json", exclude=_UNHASHED_FIELDS)
        for section, fields in _LATER_FIELDS.items():
            kind = type(getattr(self, section))
            for field in fields:
                if content[section][field] == kind.model_fields[field].default:
                    del content[section][field]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def modified(self, overrides: dict[str, str]) -> Lane:
        """Make the modified lane of `--set FIELD=VALUE`.

        Parameters
        ----------
        overrides : dict of str to str
            Field (`max_tokens`, or in full `sampling.max_tokens`) to value (JSON or YAML). May be
            set: everything in `sampling`, `timeouts` and `limits`, `repeats`, `concurrency` and
            `limit` (of the data set). A value that the lane already has changes nothing.

        Returns
        -------
        Lane
            Named and hashed apart and without published figures; the lane itself if nothing
            changed.

        Raises
        ------
        ValueError
            If a field is unknown or may not be set, or a value is not of its type.
        """
        if self.is_modified:
            raise ValueError(f"lane: {self.name} is modified already; modify {self.base} instead")
        content = self.model_dump(mode="python")
        changed: dict[str, Any] = {}
        for given, text in overrides.items():
            path = _settable_path(given)
            value = _parse_value(text)
            *sections, leaf = path.split(".")
            target = content
            for section in sections:
                target = target[section]
            if target[leaf] != value or isinstance(target[leaf], bool) != isinstance(value, bool):
                target[leaf] = value
                changed[path] = value
        if not changed:
            return self
        fields = ",".join(
            f"{path.rpartition('.')[2]}={json.dumps(value, separators=(',', ':'))}"
            for path, value in sorted(changed.items())
        )
        content.update(
            name=f"{self.name}+modified({fields})",
            base=self.name,
            overrides=dict(sorted(changed.items())),
            published=[],
        )
        # A prompt's first text stays the same under every settable field.
        return lane_from(content, f"lane {self.name} with --set")


def overrides(given: list[str]) -> dict[str, str]:
    """Take `--set FIELD=VALUE` apart.

    Raises
    ------
    ValueError
        If one is of another form, or sets a field again.
    """
    changes: dict[str, str] = {}
    for change in given:
        field, equals, value = change.partition("=")
        if not equals or not field:
            raise ValueError(f"--set: must be FIELD=VALUE, got {change!r}")
        if field in changes:
            raise ValueError(f"--set: {field} is set twice")
        changes[field] = value
    return changes


def _settable_path(given: str) -> str:
    """Complete `max_tokens` to `sampling.max_tokens`, or refuse."""
    sections: dict[str, type[BaseModel]] = {
        "sampling": Sampling,
        "timeouts": Timeouts,
        "limits": Limits,
    }
    settable = [
        *_SETTABLE_FIELDS,
        *(f"{name}.{field}" for name, kind in sections.items() for field in kind.model_fields),
    ]
    for path in settable:
        if given in (path, path.rpartition(".")[2]):
            return path
    leaves = ", ".join(sorted(path.rpartition(".")[2] for path in settable))
    raise ValueError(f"--set: no field {given!r} that may be set; there are {leaves}")


def _parse_value(text: str) -> Any:
    """Read an override's value: JSON first (YAML reads 1e-3 as a text), then YAML."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set: not a value: {text!r}") from error


def lane_from(content: Any, source: str) -> Lane:
    """Make a lane of its fields.

    Parameters
    ----------
    content : object
        A mapping of fields, as in a lane file or a receipt.
    source : str
        Where it comes from, for the error.

    Raises
    ------
    ValueError
        One line that names source, field and value.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{source}: must be a mapping of fields, got {content!r}")
    try:
        return Lane.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            problem = "is missing"
        elif first["type"] == "extra_forbidden":
            problem = f"is no field of a lane, got {first['input']!r}"
        elif first["type"] == "value_error":
            # Our own checks name the field inside the section and its value.
            where, _, rest = message.partition(": ")
            field, problem = f"{field}.{where}" if field else where, rest
        else:
            problem = f"{message[0].lower()}{message[1:]}, got {first['input']!r}"
        raise ValueError(f"{source}: {field}: {problem}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice (YAML itself keeps the last one silently)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"field {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def lane_names() -> list[str]:
    """List the names of the lanes that come with the package."""
    return sorted(path.stem for path in LANES_DIR.glob("*.yaml"))


def load_lane(name_or_path: str) -> Lane:
    """Load a lane by name, or from a YAML file of the reader's own.

    Parameters
    ----------
    name_or_path : str
        A name from `lane_names()`, or a path (anything with a slash or a YAML suffix).

    Returns
    -------
    Lane
        Validated.

    Raises
    ------
    ValueError
        One line that names the file, the field and the value.
    """
    if "/" in name_or_path or re.search(r"\.ya?ml$", name_or_path):
        path = Path(name_or_path).expanduser()
    elif name_or_path in lane_names():
        path = LANES_DIR / f"{name_or_path}.yaml"
    else:
        raise ValueError(
            f"lane: no lane {name_or_path!r}; there are {', '.join(lane_names())}, "
            "or give the path of a YAML file"
        )
    source = f"lane file {path}"
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: is not YAML: {' '.join(str(error).split())}") from error
    lane = lane_from(content, source)
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", lane.name):
        raise ValueError(
            f"{source}: name: must be lower-case letters, digits, '.', '_' and '-', "
            f"got {lane.name!r}"
        )
    if lane.is_modified or lane.overrides:
        raise ValueError(f"{source}: base: belongs to lanes made by --set, got {lane.base!r}")
    if lane.name in lane_names() and path.resolve() != LANES_DIR / f"{lane.name}.yaml":
        raise ValueError(f"{source}: name: taken by a lane of the package, got {lane.name!r}")
    return lane


def rows_sha256(rows: list[dict[str, Any]]) -> str:
    """Hash question rows as JSON lines with sorted keys, as a generated set's `sha256` is."""
    text = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print every field as JSON.")] = False,
) -> None:
    """Show the lanes: endpoint, questions, repeats, sampling, concurrency and margin."""
    lanes = [load_lane(name) for name in lane_names()]
    if as_json:
        listing = [{**lane.model_dump(mode="json"), "sha256": lane.sha256} for lane in lanes]
        print(json.dumps({"schema": "draftproof.accuracy-lanes/1", "lanes": listing}, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    for lane in lanes:
        sampling = ", ".join(f"{field} {value}" for field, value in lane.sampling.sent.items())
        console.print(f"[bold]{lane.name}[/bold]  {lane.description}")
        for label, text in (
            (
                "asks",
                f"{lane.dataset.scored} questions x {lane.repeats}, {lane.concurrency} at a time",
            ),
            ("endpoint", lane.endpoint),
            ("data", f"{lane.dataset.kind} {lane.dataset.name} sha256 {lane.dataset.sha256}"),
            ("prompt", f"{lane.prompt.kind} {lane.prompt.name} sha256 {lane.prompt.sha256}"),
            ("sampling", sampling),
            ("scorer", f"{lane.scorer}, margin {lane.margin_pp:g} points"),
            ("lane", f"sha256 {lane.sha256}"),
        ):
            console.print(f"  {label:9} {text}", markup=False)

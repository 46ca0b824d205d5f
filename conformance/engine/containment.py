"""What stands between code from outside and the process that runs it: it costs its own line alone.

A call may leave the process with other signal handlers, streams, defaults of torch or working
folder; may end, fork or interrupt it; may raise what is no error. Each call is made through
`contained`, which puts all that back, and within `TimeLimit`, which ends it in time. What neither
can stop (a hang in C, `exec`, a crash) ends the worker, and the controlling process starts another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import locale
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from draftproof.conformance.engine import seals

HERE = Path(__file__).resolve().parents[1]
LIBRARY = Path(os.__file__).parent

LOST_PROCESS = 70
"""Exit code of a worker that gives up by itself."""

TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


@dataclasses.dataclass
class _State:
    putting_back: bool = False
    spoiled: str = ""


_state = _State()


def spoiled() -> str:
    """What could not be put back in this process, so that others should run in a new one."""
    return _state.spoiled


class OutOfTime(BaseException):
    """A check has exceeded its limit; the message says where it was seen."""


class Ended(Exception):
    """Code from outside raised what would end or pass its own check.

    Parameters
    ----------
    kind : str
        Name of what it raised.
    message : str
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TimeLimit:
    """Raises `OutOfTime` in the main thread when a check has taken too long.

    Parameters
    ----------
    seconds : float
        Not positive: no limit.

    Used as a context manager. Out of the main thread, or where there is no SIGALRM, it does
    nothing: there the controlling process ends the worker.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._armed = False
        self._rang = ""
        self._usable = (
            seconds > 0
            and hasattr(signal, "SIGALRM")
            and threading.current_thread() is threading.main_thread()
        )

    def _ring(self, number: int, frame: types.FrameType | None) -> None:
        # It rings again every second: for code that swallows the first, and after putting back.
        if self._armed and not _state.putting_back:
            self._rang = _place(frame)
            raise OutOfTime(self._rang)

    def __enter__(self) -> TimeLimit:
        if self._usable:
            self._before = signal.signal(signal.SIGALRM, self._ring)
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, self.seconds, 1.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # First of all: from here on the signal changes nothing.
        self._armed = False
        if self._usable:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)
        if self._rang and kind is not OutOfTime:
            # Code that swallowed it, or made something else of it, was late all the same.
            raise OutOfTime(self._rang)


def _place(frame: types.FrameType | None) -> str:
    """The innermost line that is not the suite's own or a library's, as `FILE:LINE`.

    A frame may have no line: that of a jump back, in Python 3.11.
    """
    first = frame
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        suites = HERE in path.parents or LIBRARY in path.parents
        if path.is_file() and not suites and "site-packages" not in path.parts:
            return f"{path}:{frame.f_lineno or frame.f_code.co_firstlineno}"
        frame = frame.f_back
    return first.f_code.co_filename if first is not None else "an unknown place"


def say(error: BaseException) -> str:
    """The message of an exception, whatever its `__str__` does."""
    try:
        return str(error)
    except OutOfTime:
        raise
    except BaseException as inner:
        return f"its message cannot be had: {type(inner).__name__}"


def contained(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which leaves the process as it found it and raises plain errors only.

    What it replaced of the suite is put back too, and told as `seals.Replaced`. `OutOfTime` passes;
    any other exception that is no `Exception`, or whose message cannot be had,
    becomes `Ended`. A forked child that returns ends there.
    """

    @functools.wraps(function, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        process = os.getpid()
        try:
            with _kept(), seals.unbroken():
                return function(*arguments, **named)
        except (OutOfTime, Exception) as error:
            if isinstance(error, Exception):
                _sayable(error)
            raise
        except BaseException as error:
            raise Ended(type(error).__name__, say(error)) from None
        finally:
            if os.getpid() != process:
                os._exit(LOST_PROCESS)

    return call


def _sayable(error: Exception) -> None:
    if (text := say(error)).startswith("its message cannot be had"):
        raise Ended(type(error).__name__, text) from None


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Put the process's state back afterwards, whatever became of it."""
    restore = [keep() for keep in _KEEPERS]
    try:
        yield
    finally:
        _state.putting_back = True
        try:
            for back in reversed(restore):
                try:
                    back()
                except Exception as error:
                    _state.spoiled = f"{type(error).__name__}: {say(error)}"
        finally:
            _state.putting_back = False


def _keep_signals() -> Callable[[], None]:
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    handlers = {number: signal.getsignal(number) for number in _settable_signals()}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    wakeup = signal.set_wakeup_fd(-1)
    if wakeup != -1:
        signal.set_wakeup_fd(wakeup)

    def back() -> None:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for timer in TIMERS[1:]:
            signal.setitimer(getattr(signal, timer), 0)
        if wakeup != -1:
            signal.set_wakeup_fd(wakeup)

    return back


@functools.cache
def _settable_signals() -> tuple[int, ...]:
    fixed = (signal.SIGKILL, signal.SIGSTOP)
    return tuple(number for number in signal.valid_signals() if number not in fixed)


def _keep_streams() -> Callable[[], None]:
    """Lend the code streams of its own: what it closes or replaces is not the run's."""
    kept = sys.stdin, sys.stdout, sys.stderr
    numbers = {number: os.dup(number) for number in (0, 1, 2) if _is_open(number)}
    lent = [
        io.TextIOWrapper(os.fdopen(os.dup(number), "wb"), errors="replace", line_buffering=True)
        for number in (1, 2)
        if number in numbers
    ]
    if len(lent) == 2:
        sys.stdout, sys.stderr = lent

    def back() -> None:
        sys.stdin, sys.stdout, sys.stderr = kept
        for stream in lent:
            with contextlib.suppress(Exception):
                stream.close()
        for number, copy in numbers.items():
            # Where it closed everything there is nothing to put back, and the worker will end.
            with contextlib.suppress(OSError):
                os.dup2(copy, number, inheritable=True)
                os.close(copy)

    return back


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _keep_process() -> Callable[[], None]:
    folder, environment = os.getcwd(), dict(os.environ)
    mask = os.umask(0o022)
    os.umask(mask)
    places = locale.setlocale(locale.LC_ALL)

    def back() -> None:
        os.chdir(folder)
        os.umask(mask)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        if locale.setlocale(locale.LC_ALL) != places:
            locale.setlocale(locale.LC_ALL, places)

    return back


def _keep_interpreter() -> Callable[[], None]:
    depth, interval = sys.getrecursionlimit(), sys.getswitchinterval()
    tracers = sys.gettrace(), sys.getprofile()
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook
    filters, show = warnings.filters[:], warnings.showwarning
    collects, thresholds = gc.isenabled(), gc.get_threshold()
    state = random.getstate()

    def back() -> None:
        if sys.gettrace() is not tracers[0]:
            sys.settrace(tracers[0])
        if sys.getprofile() is not tracers[1]:
            sys.setprofile(tracers[1])
        sys.setrecursionlimit(depth)
        sys.setswitchinterval(interval)
        sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook = hooks
        if warnings.filters != filters:
            warnings.filters[:] = filters  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        warnings.showwarning = show
        (gc.enable if collects else gc.disable)()
        gc.set_threshold(*thresholds)
        random.setstate(state)

    return back


def _keep_torch() -> Callable[[], None]:
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    state = torch.random.get_rng_state()
    denormal = torch.finfo(torch.float32).smallest_normal
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    inference = torch.is_inference_mode_enabled()
    cuda = torch.cuda.is_initialized()
    stream = torch.cuda.current_stream() if cuda else None

    def back() -> None:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device == torch.device("cpu") else device)
        while torch._C._len_torch_function_stack() > modes[0]:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > modes[1]:
            torch._C._pop_torch_dispatch_stack(None)
        if torch.is_inference_mode_enabled() != inference:
            raise RuntimeError("torch's inference mode cannot be left")
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if (
            torch.are_deterministic_algorithms_enabled() != strict
            or torch.is_deterministic_algorithms_warn_only_enabled() != warn_only
        ):
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        torch.random.set_rng_state(state)
        # No getter tells whether the processor flushes denormal numbers, but it does.
        if torch.tensor(denormal, dtype=torch.float32).mul_(0.5).item() == 0:
            torch.set_flush_denormal(False)
        if stream is not None and torch.cuda.current_stream() != stream:
            torch.cuda.set_stream(stream)

    return back


_KEEPERS = (_keep_streams, _keep_signals, _keep_process, _keep_interpreter, _keep_torch)

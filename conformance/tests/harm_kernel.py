"""An implementation that gives the right result, and harms its process as its call says."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
from torch import Tensor


class Mute(Exception):
    """An exception without a message."""

    def __str__(self) -> str:
        raise RuntimeError("no message for you")


class Base(BaseException):
    """No `Exception`."""


def _hangs() -> None:
    # The jump back behind a closing `if` has no line number in Python 3.11.
    while True:
        r = 1
        if r < 0:
            r = 0


def _swallows() -> None:
    with contextlib.suppress(BaseException):
        _hangs()


def _blocks() -> None:
    faulthandler.cancel_dump_traceback_later()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    ctypes.PyDLL(None).pause()


def _deep() -> None:
    _deep()


def _raise(error: BaseException) -> None:
    raise error


def _handlers() -> None:
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, 0)


def _streams() -> None:
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    sys.stdout = sys.stderr = sys.stdin = None  # type: ignore[assignment]


def _defaults() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.manual_seed(3)
    torch.set_flush_denormal(True)


def _modes() -> None:
    torch.device("meta").__enter__()
    _KEPT.append(torch.inference_mode())
    _KEPT[-1].__enter__()


_KEPT: list[torch.inference_mode] = []


def _process() -> None:
    os.chdir("/")
    os.environ.clear()
    os.umask(0o777)
    warnings.simplefilter("error")
    gc.disable()
    sys.setrecursionlimit(200)
    sys.settrace(lambda *_: None)
    threading.Thread(target=time.sleep, args=(300,)).start()


HARM = {
    "fine": lambda: None,
    "hangs": _hangs,
    "sleeps": lambda: time.sleep(600),
    "swallows": _swallows,
    "blocks": _blocks,
    "writes": lambda: ctypes.memset(8, 1, 1),
    "exits": lambda: os._exit(0),
    "execs": lambda: os.execv("/bin/sleep", ["sleep", "0"]),
    "skips": lambda: pytest.skip("hard"),
    "xfails": lambda: pytest.xfail("hard"),
    "ends": sys.exit,
    "interrupts": lambda: _raise(KeyboardInterrupt()),
    "base": lambda: _raise(Base("odd")),
    "mute": lambda: _raise(Mute()),
    "deep": _deep,
    "handlers": _handlers,
    "streams": _streams,
    "defaults": _defaults,
    "modes": _modes,
    "process": _process,
    "faulthandler": faulthandler.disable,
    "forks": os.fork,
}


def doubled(x: Tensor, out: Tensor, *, harm: str) -> None:
    """The right result, then the harm."""
    if x.shape != out.shape:
        raise ValueError("out: another shape is due")
    out.copy_(x + x)
    HARM[harm]()

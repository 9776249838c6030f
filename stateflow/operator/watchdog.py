"""Watchdog for operators that do not return: such an operator fails its batch, and does not stop its replica.

One thread runs a batch. If the batch takes too long while the operator's Python code runs, the watchdog raises
:class:`Interrupted` in that code: the batch fails, and its partition continues. Code that waits in a call into C cannot
be interrupted. Its batch is then *taken away*: it can never commit, even if the call returns. This replica does not
serve the partition until the call returns. Other partitions continue in a new thread.

Rules:

* Interrupted is raised only while the thread is in the operator's code: the innermost frame is not stateflow's, and its
  nearest caller in stateflow is the file that calls operators. So no bookkeeping is interrupted halfway.
* A commit is shielded: after ``begin_commit``, the watchdog neither raises Interrupted nor takes the batch away.
  ``begin_commit`` and the watchdog decide under one lock, so that exactly one of them is first.
* An instance of an operator that was interrupted serves no more batches; the next batch gets a new instance.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from types import FrameType
from typing import Protocol

from stateflow.errors import OperatorStuck
from stateflow.types import PartitionId

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH120, PTH100 - as in code objects
#: the file in which operators are called
_CALLER = os.path.join(_PACKAGE, "operator", "instance.py")  # noqa: PTH118
FRAMES_SHOWN = 12
#: switch interval while the frames of a running thread are walked, in seconds; walking takes far less
ALONE_S = 0.1


class Interrupted(BaseException):
    """Raised in the middle of an operator that does not return."""


class Discardable(Protocol):
    def discard(self) -> None: ...


class Guard(Protocol):
    """A watchdog that may end a batch from outside, but not while the batch is being committed."""

    def begin_commit(self) -> None:
        """Begins the commit. Raises Interrupted, before anything is written, if the batch was taken away."""
        ...

    def end_commit(self) -> None: ...


class Unguarded:
    def begin_commit(self) -> None: ...

    def end_commit(self) -> None: ...


UNGUARDED = Unguarded()

#: object that identifies this process; a forked child makes another one. A batch compares it three times, and a system
#: call would take microseconds each time
_process = object()


def _in_child() -> None:
    global _process  # noqa: PLW0603 - of a process
    _process = object()


os.register_at_fork(after_in_child=_in_child)


class RunningBatch:
    """One partition's batch while a thread works on it.

    Attributes:
        began: when the batch began, in monotonic seconds.
        left: True if no caller waits for the batch's thread any more.
        taken: True if the batch was taken away: it can never commit, and the thread that took it away has ended it.
        processor: the partition's processor, if the batch was taken away; discarded when the batch's thread returns.
    """

    __slots__ = (
        "_ended",
        "_lock",
        "_shielded",
        "_stack",
        "began",
        "interrupted",
        "left",
        "partition",
        "process",
        "processor",
        "taken",
        "thread",
    )

    def __init__(self, partition: PartitionId, began: float) -> None:
        self.partition = partition
        self.began = began
        self.thread = threading.get_ident()
        self.process = _process
        self.interrupted = self.taken = self.left = False
        self.processor: Discardable | None = None
        self._stack = ""
        self._shielded = self._ended = False
        self._lock = threading.Lock()

    # -- in its own thread --------------------------------------------------------------------------------

    def begin_commit(self) -> None:
        """Shields the commit, after the operator's last call. Raises Interrupted if the batch was taken away."""
        self.end_children()
        self.shield()
        if self.taken:
            raise Interrupted

    def end_children(self) -> None:
        """Ends this process if it is a child that the operator forked, because only the parent process may write this
        batch and the batches that run at the same time."""
        if _process is not self.process:
            os._exit(70)

    def shield(self) -> None:
        """Shields the batch, so that from now on it is neither interrupted nor taken away."""
        with self._lock:
            self._shielded = True
            self._withdraw()

    def end_commit(self) -> None:
        """Ends the shield, because the operator is called again in the same batch."""
        self._shielded = False

    def end(self) -> bool:
        """Ends the batch, which is committed or rolled back. Returns False if it was taken away and thereby ended."""
        self.end_children()
        with self._lock:
            self._ended = True
            self._withdraw()
            return not self.taken

    def _withdraw(self) -> None:
        if self.interrupted:
            _raise_in(self.thread, None)

    # -- in the watchdog's thread -------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._ended

    def interrupt(self) -> None:
        """Interrupts the batch's thread with Interrupted, if that thread runs the operator's code now."""
        with self._lock, _alone():
            if self._shielded or self._ended:
                return
            frame = sys._current_frames().get(self.thread)
            if frame is None or not in_operator(frame):
                return
            at = frame.f_lasti
            self.interrupted = True
            _raise_in(self.thread, Interrupted)
            if sys._current_frames().get(self.thread) is not frame or frame.f_lasti != at:
                _raise_in(self.thread, None)  # the thread has continued to an unknown place

    def take_away(self) -> bool:
        """Takes the batch away, so that it can never commit. Returns False if it has ended or is being committed."""
        with self._lock:
            if self._ended or self._shielded:
                return False
            self.taken, self._stack = True, self._stack_now()
            return True

    def refusal(self, *, of_later: bool = False) -> OperatorStuck:
        """Makes the error that refuses this batch after it was taken away, or a later batch of the partition."""
        return OperatorStuck(
            "the operator did not return in time, and waits where it cannot be interrupted",
            remedy="fix the operator and restart the replica, or move the partition; this replica serves the partition "
            "again when the operator returns; the batch was not applied",
            operator=self.partition.operator,
            partition=self.partition.partition,
            cause="earlier_batch" if of_later else None,
            traceback="\n" + self._stack,
        )

    def _stack_now(self) -> str:
        """Returns the stack of the operator's code as it is now, innermost last."""
        with _alone():
            frame = sys._current_frames().get(self.thread)
            frames = [] if frame is None else list(traceback.walk_stack(frame))
        stack = traceback.StackSummary.extract(iter(frames[::-1]))
        first = max((n for n, each in enumerate(stack) if each.filename == _CALLER), default=-1)
        return "".join(traceback.format_list(stack[first + 1 :][-FRAMES_SHOWN:]))


@contextmanager
def _alone() -> Iterator[None]:
    """Lets no other thread run Python code in the block, which must be short and wait for nothing.

    The frames of a running thread must not be walked, because in CPython 3.11 a frame that has just returned is freed
    memory. Another thread gets the interpreter's lock only after it has waited for a whole switch interval in which the
    lock had the same holder.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(ALONE_S)
    sleep(0.0)  # gives up the lock and takes it again, after threads that already waited for it
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def frames_of(error: BaseException, most: int) -> str:
    """Returns the ``most`` innermost frames of an error's stack, innermost last.

    The function is in this module, which calls no operator. Reading source text may take so long that, in the module
    that calls operators, the watchdog would interrupt it like an operator's code.
    """
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-most:]))


def stalled_s(busy_since: float | None, has_batch: bool, served_at: float, now: float) -> float:
    """Returns for how many seconds the thread for batches has run no batch although there is work.

    The thread may wait for a partition that another thread holds, or for an operator's ``__del__``. All times are
    monotonic seconds.

    Args:
        busy_since: when the thread began with its present work; None: it is idle.
        has_batch: whether that work is a batch.
        served_at: when a batch last ran.
    """
    return 0.0 if busy_since is None or has_batch else now - max(busy_since, served_at)


def in_operator(frame: FrameType | None) -> bool:
    """Tells whether the frame is in the operator's code, or in code that it has called."""
    # the thread is running, so its frame or that frame's caller may be gone; CPython 3.11 then returns another object
    if not isinstance(frame, FrameType) or frame.f_code.co_filename.startswith(_PACKAGE):
        return False
    while isinstance(frame, FrameType) and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return isinstance(frame, FrameType) and frame.f_code.co_filename == _CALLER


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Makes another thread raise ``error``. None withdraws an error that the thread has not raised yet."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)

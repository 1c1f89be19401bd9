"""Why a worker ended, in one sentence, from its exit codes, signals and last lines."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from whimbrel.errors import EXIT_FENCED, EXIT_USER_ERROR
from whimbrel.limits import EXIT_SENTENCE_CHARS
from whimbrel.wire.work import WorkerExit

_ERROR_LINE: Final = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|[a-z][A-Za-z]*): .+")
_SIGNAL_HINTS: Final = {
    "SIGSEGV": "a native library crashed (bad memory access)",
    "SIGBUS": "a native library crashed, or a mapped file was cut short or its disk is full",
    "SIGABRT": "a native library gave up (abort)",
    "SIGFPE": "a native library divided by zero",
    "SIGILL": "a library uses instructions that this processor lacks",
    "SIGTERM": "somebody asked it to end",
    "SIGINT": "somebody interrupted it",
    "SIGHUP": "its terminal went away",
    "SIGXCPU": "it used up its limit of processor time",
    "SIGXFSZ": "it reached its limit of file size",
}


@dataclass(frozen=True)
class RankEnd:
    """How one process ended."""

    rank: int
    code: int | None
    """Exit code; negative: the signal's number; None: nobody could see it."""
    cause: str = ""
    """What the process itself wrote of its end."""

    @property
    def good(self) -> bool:
        return self.code == 0


def first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The end that explains the others, of ends seen at the same moment: peers of a dead rank fail after it.

    A rank that says who is to blame (fenced, user error) goes before a signal, that before other failures.
    """

    def weight(end: RankEnd) -> tuple[int, int]:
        if end.code in (EXIT_FENCED, EXIT_USER_ERROR):
            return 0, end.rank
        if end.code is not None and end.code < 0:
            return 1, end.rank
        if end.code is not None:
            return 2, end.rank
        return 3, end.rank

    return min((end for end in ends if not end.good), key=weight, default=None)


def explain(
    end: RankEnd, *, log_tail: str, ranks: int, killed_for_memory: bool, stop_reason: str = "", adopted: bool = False
) -> WorkerExit:
    """The worker's exit from the end of its decisive process.

    `stop_reason` is set when the agent itself ended it; then that is the cause.
    """
    name = _signal_name(end.code)
    code = None if name else end.code
    who = f"Rank {end.rank}" if ranks > 1 else "The process"
    if stop_reason:
        cause = f"Stopped by the node's agent: {stop_reason.rstrip('.')}."
    elif name:
        cause = _signal_sentence(who, name, killed_for_memory)
    else:
        cause = _code_sentence(who, end, log_tail, adopted)
    return WorkerExit(code=code, signal=name, cause=cause[:EXIT_SENTENCE_CHARS], log_tail=log_tail)


def _signal_name(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:  # real-time signals between the first and the last have no name
        return f"signal {-code}"


def _signal_sentence(who: str, name: str, killed_for_memory: bool) -> str:
    if name == "SIGKILL":
        if killed_for_memory:
            return f"{who} was killed (SIGKILL), and the kernel killed for lack of memory while it ran: give it more."
        return f"{who} was killed from outside (SIGKILL); the kernel counted no kill for lack of memory."
    hint = _SIGNAL_HINTS.get(name)
    return f"{who} ended by {name}" + (f": {hint}." if hint else ".")


def _code_sentence(who: str, end: RankEnd, log_tail: str, adopted: bool) -> str:
    if end.code is None and end.cause:
        return end.cause
    if end.code is None:
        said = last_words(log_tail)
        how = "an earlier agent had started it, so its exit status is not known" if adopted else "it vanished"
        return f"{who} ended; {how}." + (f" Its last line: {said}" if said else "")
    if end.code == 0:
        return "Finished."
    said = end.cause or last_words(log_tail)
    if end.code == EXIT_FENCED:
        return said if end.cause else f"{who} found a newer owner of its part and stopped without writing (fenced)."
    if end.code == EXIT_USER_ERROR:
        return said or f"{who} says that the run's model, environment or run file is at fault (exit {end.code})."
    if end.code == 128 + signal.SIGTERM:
        return f"{who} stopped because somebody other than the node's agent asked it to (SIGTERM)."
    return f"{who} failed with exit code {end.code}" + (f": {said}" if said else " and printed nothing.")


def last_words(log_tail: str) -> str:
    """The last line that names an exception, else the last line with text."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    # Peers and destructors chatter after a traceback; the exception's own line starts at the margin.
    for line in reversed(log_tail.splitlines()):
        if _ERROR_LINE.match(line):
            return line.strip()[:EXIT_SENTENCE_CHARS]
    return lines[-1][:EXIT_SENTENCE_CHARS] if lines else ""

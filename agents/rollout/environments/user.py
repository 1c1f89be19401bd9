"""The user's own environment, in a process of its own.

User code may hang, crash, leak or print. It runs in a child process; one call at a time goes over a pair of pipes with a
deadline. A child that misses it or dies is killed, the call raises `EnvironmentFailed`, and the next call starts a new one.
"""

from __future__ import annotations

import math
import os
import select
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Final

import msgspec
import psutil

from agents.rollout.environments.base import Prompt, as_messages
from whimbrel.errors import EnvironmentFailed, UsageError
from whimbrel.limits import ENVIRONMENT_EXIT_S, ENVIRONMENT_START_S, FRAME_MAX_BYTES
from whimbrel.spec import EnvironmentSpec

LENGTH: Final = struct.Struct("!I")


class UserEnvironment:
    """`prompt` and `reward` of the object that the user's function returned, called in a child process."""

    def __init__(self, spec: EnvironmentSpec, seed: int) -> None:
        """Start the child and load the user's code. Raises UsageError: it cannot be loaded."""
        assert spec.entry is not None
        self._spec = spec
        self._entry = spec.entry
        self._seed = seed
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        with self._lock:
            self._start()

    def prompt(self, index: int) -> Prompt:
        value = self._call("prompt", index)
        if isinstance(value, str):
            return Prompt(messages=as_messages(value, self._spec.system_prompt))
        if isinstance(value, dict) and "prompt" in value:
            prompt, answer = value["prompt"], str(value.get("answer", ""))
            if isinstance(prompt, str):
                return Prompt(messages=as_messages(prompt, self._spec.system_prompt), answer=answer)
            value = prompt
        else:
            answer = ""
        if _are_messages(value):
            return Prompt(messages=msgspec.convert(value, list[dict[str, str]]), answer=answer)
        raise EnvironmentFailed(
            f"{self._entry}: prompt({index}) returned {type(value).__name__}, not text or messages.",
            hint="See docs/environments.md for what prompt() returns.",
        )

    def score(self, index: int, completion: str) -> float:
        value = self._call("reward", index, completion)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EnvironmentFailed(f"{self._entry}: reward({index}, …) returned {value!r}, not a finite number.")
        return float(value)

    def describe(self) -> str:
        return f"{self._entry} with {self._spec.params or 'no parameters'}, in a process of its own"

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _call(self, verb: str, *arguments: Any) -> Any:
        with self._lock:
            if self._child is None:
                self._start()
            try:
                reply = self._exchange([verb, *arguments], self._spec.timeout_s)
            except TimeoutError as error:
                self._kill()
                raise EnvironmentFailed(
                    f"{self._entry}: {verb}({arguments[0]}) took longer than {self._spec.timeout_s:g} s; "
                    "its process was killed and is started again.",
                    hint="Raise environment.timeout_s, or make the call faster.",
                ) from error
            except (EOFError, OSError) as error:
                code = self._kill()
                raise EnvironmentFailed(
                    f"{self._entry}: its process ended with {_exit_words(code)} during {verb}({arguments[0]}).",
                    hint="Its last lines are in the worker's log.",
                ) from error
        if "error" in reply:
            raise EnvironmentFailed(f"{self._entry}: {verb}({arguments[0]}) raised {reply['error']}.")
        return reply["value"]

    def _start(self) -> None:
        request_read, self._requests = os.pipe()
        self._replies, reply_write = os.pipe()
        # In the worker's own process group, so that who kills the worker's group kills this too; and the guest ends
        # by itself when the request pipe closes.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "agents.rollout.environments.guest", str(request_read), str(reply_write)],
            pass_fds=(request_read, reply_write),
            stdin=subprocess.DEVNULL,
        )
        os.close(request_read)
        os.close(reply_write)
        try:
            reply = self._exchange(["load", self._entry, dict(self._spec.params), self._seed], ENVIRONMENT_START_S)
        except (TimeoutError, EOFError, OSError) as error:
            code = self._kill()
            raise UsageError(
                f"environment.entry {self._entry} could not be loaded: its process ended with {_exit_words(code)}, "
                f"or took longer than {ENVIRONMENT_START_S:g} s.",
                hint="Its last lines are in the worker's log.",
            ) from error
        if "error" in reply:
            self._kill()
            raise UsageError(
                f"environment.entry {self._entry} could not be loaded: {reply['error']}.",
                hint="`python -m agents.rollout.environments check` tries it; see docs/environments.md.",
            )

    def _exchange(self, request: list[Any], timeout_s: float) -> dict[str, Any]:
        data = msgspec.msgpack.encode(request)
        deadline = time.monotonic() + timeout_s
        os.set_blocking(self._requests, False)
        view = memoryview(LENGTH.pack(len(data)) + data)
        while view:  # a guest that reads nothing must not block us past the deadline
            _, writable, _ = select.select([], [self._requests], [], max(0.0, deadline - time.monotonic()))
            if not writable:
                raise TimeoutError
            view = view[os.write(self._requests, view) :]
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if length > FRAME_MAX_BYTES:
            raise OSError(f"a reply of {length} bytes")
        return msgspec.msgpack.decode(self._read(length, deadline))

    def _read(self, length: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            readable, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError
            part = os.read(self._replies, length - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _kill(self) -> int | None:
        """End the child and whatever it started; returns its exit code."""
        child, self._child = self._child, None
        if child is None:
            return None
        for pipe in (self._requests, self._replies):
            os.close(pipe)
        try:
            started = psutil.Process(child.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        if child.poll() is None:
            try:
                child.wait(timeout=0.05)  # one that is just dying tells its own exit code
            except subprocess.TimeoutExpired:
                child.kill()
        for process in started:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        return child.wait(timeout=ENVIRONMENT_EXIT_S)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )


def _exit_words(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"

"""The one exception tree.

Every error that can reach a user has a stable `code`, one sentence with the values in it, and a `hint` that says
what to do. API, CLI, log and dashboard render the same object. `status` is the HTTP status and `exit_code` the exit
code of the CLI; both belong to the class, so that the same failure looks the same everywhere.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_CONFLICT = 4
EXIT_UNREACHABLE = 5
EXIT_TIMEOUT = 6
EXIT_INTERRUPTED = 130

# Exit codes of worker processes, which the node agent reads. Chosen outside the shell's and Python's own.
EXIT_FENCED = 86
"""The worker found a newer owner of its role and stopped without writing."""
EXIT_USER_ERROR = 87
"""The user's model, environment or run file is at fault: restarting as it stands cannot help."""


class WhimbrelError(Exception):
    """Base of everything that Whimbrel raises on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "", **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class UsageError(WhimbrelError):
    """What the user asked for cannot be meant: bad option, bad run file, bad body."""

    code = "invalid"
    status = 422
    exit_code = EXIT_USAGE


class SpecError(UsageError):
    """A run file or spec does not validate."""

    code = "invalid_spec"


class NotFound(WhimbrelError):
    code = "not_found"
    status = 404
    exit_code = EXIT_NOT_FOUND


class Conflict(WhimbrelError):
    """The resource is not in a state in which this can be done."""

    code = "conflict"
    status = 409
    exit_code = EXIT_CONFLICT


class Unauthorized(WhimbrelError):
    code = "unauthorized"
    status = 401
    exit_code = EXIT_USAGE


class Forbidden(WhimbrelError):
    code = "forbidden"
    status = 403
    exit_code = EXIT_USAGE


class Unreachable(WhimbrelError):
    """A peer (controller, etcd, database, chunk server) does not answer now; trying again may help."""

    code = "unreachable"
    status = 503
    exit_code = EXIT_UNREACHABLE


class TimedOut(WhimbrelError):
    """A wait reached its named deadline."""

    code = "timeout"
    status = 504
    exit_code = EXIT_TIMEOUT


class Fenced(WhimbrelError):
    """A newer epoch owns what this process tried to write; it must stop and write nothing more."""

    code = "fenced"
    status = 409
    exit_code = EXIT_FENCED


class LimitReached(WhimbrelError):
    """A named bound of `whimbrel.limits` was reached."""

    code = "limit_reached"
    status = 429


class Corrupt(WhimbrelError):
    """Bytes do not match their digest, or do not decode: never used, fetched again from elsewhere."""

    code = "corrupt"


class DigestMismatch(Corrupt):
    """The state after an apply or a replay is not the state that the log recorded."""

    code = "digest_mismatch"


class MissingChunk(WhimbrelError):
    """A chunk or manifest that the log names is not held by any source that was asked."""

    code = "missing_chunk"
    status = 404
    exit_code = EXIT_NOT_FOUND


class ChainGap(WhimbrelError):
    """No anchor and deltas lead to the version asked for; the message names the gap."""

    code = "chain_gap"
    status = 409


class StorageFull(WhimbrelError):
    """The disk or bucket has no room; nothing that was committed is lost."""

    code = "storage_full"
    status = 507


class SchemaMismatch(WhimbrelError):
    """The database's schema is older or newer than this program's."""

    code = "schema_mismatch"
    status = 503


class EnvironmentFailed(WhimbrelError):
    """An environment could not produce a prompt or a reward. Never the same thing as a reward of 0."""

    code = "environment_failed"

"""The errors that a caller can meet, as a tree:

    DjinnError
    ├── ConnectionLost          the daemon cannot be reached, or went away in mid-call
    │   └── CertificateNotTrusted  another machine's certificate is unknown here, or not the one that was trusted
    ├── ProtocolError           the bytes are not djinnd's protocol
    │   ├── FrameTooLarge       a message is larger than one may be
    │   └── VersionMismatch     client and daemon are of releases that do not understand each other
    ├── InvalidRequest          the caller's fault: change the call
    │   ├── PromptTooLong       prompt and output would exceed the model's context
    │   ├── TokenOutOfRange     a token id is beyond the model's vocabulary
    │   ├── NoTokenizer         the model has no tokenizer: send token ids
    │   ├── GrammarRejected     the output's format is invalid, impossible, or too expensive to follow
    │   ├── SessionStateError   the session is closed, or at no breakpoint …: the message has the remedy
    │   ├── ModelMismatch       a saved session is of a model with other weights
    │   └── FileDamaged         a saved session's file is cut short or changed
    ├── NotFound                no such thing, or not yours: the answer is the same
    │   ├── SessionNotFound     unknown, closed, or another user's: the answer is the same
    │   ├── AdapterNotFound     no adapter of this name for the model, or its files have changed: name its folder again
    │   ├── FunctionNotFound    the intervention process has lost the function: intervene again
    │   └── ModelNotFound       no model of this name, or not for this user
    │       └── FilesWanted     the daemon asks for the folder's open files; the client sends them by itself
    ├── NotAuthenticated        the token is unknown, expired or revoked: the answer is the same
    ├── NotPermitted            the caller may not do this
    │   └── QuotaExceeded       the request exceeds the caller's quota: the message names it
    ├── FunctionFailed          a function failed in the intervention process: the message says why
    ├── TextFailed              the model's tokenizer failed, or exceeded a limit: the message has the limit
    ├── SessionBusy             one call at a time on a session
    ├── SessionLost             the session's imported KV is lost and cannot be recomputed; its tokens can be read
    ├── ModelRejected           the checkpoint is missing, damaged, or fails the check at load
    ├── OutOfMemory             the memory does not suffice: the message has the figures
    ├── Cancelled               the request was ended before it had a result
    └── Retry                   not the caller's fault: the same call may work in a moment
        ├── EngineLost          no engine started in time, or two died with this request in their step
        ├── Busy                too many requests wait already: `retry_s` says when to try again
        ├── JournalUnavailable  sessions cannot be written to disk: new work is refused
        └── ShuttingDown        the daemon stops: connect again when it is back

Each has a code, which travels on the wire, and a class, which is raised.
"""

from __future__ import annotations

from typing import Any, ClassVar


class DjinnError(Exception):
    """Base of all errors. `code` names the class on the wire; `data` holds the figures of the message."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, /, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.data = data


class ConnectionLost(DjinnError):
    code = "connection_lost"


class CertificateNotTrusted(ConnectionLost):
    code = "certificate_not_trusted"


class ProtocolError(DjinnError):
    code = "protocol_error"


class FrameTooLarge(ProtocolError):
    code = "frame_too_large"


class VersionMismatch(ProtocolError):
    code = "version_mismatch"


class InvalidRequest(DjinnError):
    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    code = "prompt_too_long"


class TokenOutOfRange(InvalidRequest):
    code = "token_out_of_range"


class NoTokenizer(InvalidRequest):
    code = "no_tokenizer"


class GrammarRejected(InvalidRequest):
    code = "grammar_rejected"


class SessionStateError(InvalidRequest):
    code = "session_state"


class ModelMismatch(InvalidRequest):
    code = "model_mismatch"


class FileDamaged(InvalidRequest):
    code = "file_damaged"


class NotFound(DjinnError):
    code = "not_found"


class SessionNotFound(NotFound):
    code = "session_not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class AdapterNotFound(NotFound):
    code = "adapter_not_found"


class FilesWanted(ModelNotFound):
    code = "files_wanted"


class FunctionNotFound(NotFound):
    code = "function_not_found"


class NotAuthenticated(DjinnError):
    code = "not_authenticated"


class NotPermitted(DjinnError):
    code = "not_permitted"


class QuotaExceeded(NotPermitted):
    code = "quota_exceeded"


class FunctionFailed(DjinnError):
    code = "function_failed"


class TextFailed(DjinnError):
    code = "text_failed"


class SessionBusy(DjinnError):
    code = "session_busy"


class SessionLost(DjinnError):
    code = "session_lost"


class ModelRejected(DjinnError):
    code = "model_rejected"


class OutOfMemory(DjinnError):
    code = "out_of_memory"


class Cancelled(DjinnError):
    code = "cancelled"


class Retry(DjinnError):
    code = "retry"


class EngineLost(Retry):
    code = "engine_lost"


class Busy(Retry):
    code = "busy"


class ShuttingDown(Retry):
    code = "shutting_down"


class JournalUnavailable(Retry):
    code = "journal_unavailable"


def _tree(cls: type[DjinnError]) -> list[type[DjinnError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


_BY_CODE = {cls.code: cls for cls in _tree(DjinnError)}


def from_code(code: str, message: str, data: dict[str, Any]) -> DjinnError:
    """The error that a `Failure` on the wire stands for; a code of a newer daemon becomes the base class."""
    return _BY_CODE.get(code, DjinnError)(message, **data)

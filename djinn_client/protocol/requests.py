"""The requests of clients, a struct each. djinn_client.protocol has their union and the frames."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from djinn_client.files.model_files import MAX_FILES, MAX_OTHERS
from djinn_client.protocol.fields.bounds import Name, Names, PackedTokens, TokenList, Whole, Wholes
from djinn_client.protocol.fields.breakpoints import HitInfo, When
from djinn_client.protocol.fields.chat import ChatInput
from djinn_client.protocol.fields.conversations import Conversation, RecordName
from djinn_client.protocol.fields.edits import Captured, Op
from djinn_client.protocol.fields.image import Dtype
from djinn_client.protocol.fields.kv_layout import KvLayout
from djinn_client.protocol.fields.output_format import OutputFormat
from djinn_client.protocol.fields.placing import Placing
from djinn_client.protocol.fields.sampling import Sampling
from djinn_client.protocol.fields.scheduling import Class
from djinn_client.protocol.info import Tier

DEFAULT_TOKENS = 256

FileName = Annotated[str, msgspec.Meta(max_length=255)]
MAX_TEMPLATE = 1 << 20  # characters of a chat template
TemplateText = Annotated[str, msgspec.Meta(max_length=MAX_TEMPLATE)]
MAX_INPUTS = 2048  # of one Embed
Files = Annotated[dict[Name, Whole], msgspec.Meta(max_length=256)]


class Request(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """`descriptors`: how many file descriptors may come with a request of this kind."""

    descriptors: ClassVar[int] = 0

    id: Whole


class Hello(Request, tag="hello"):
    """Answered by Welcome. With a token the connection belongs to the token's principal, on every transport; without
    one it belongs to the Unix user. An unknown, expired or revoked token is answered by NotAuthenticated, and the
    connection is closed."""

    client: Name = ""
    token: Name = ""


class Ping(Request, tag="ping"):
    pass


class OpenSession(Request, tag="open"):
    model: Name
    priority: Class | None = None  # None: the highest that the caller may have
    adapter: Name = ""  # a LoRA adapter of the model, by its name or its PEFT folder; "": none


class AttachSession(Request, tag="attach"):
    session: Name


class ForkSession(Request, tag="fork"):
    """Opens a second session with the model, the tokens and the KV of an idle session of the caller. From then on the
    two are independent."""

    session: Name
    priority: Class | None = None  # None: as the first one


class CloseSession(Request, tag="close"):
    session: Name


class Generate(Request, tag="generate"):
    """Extends the session by the prompt (text, token ids, or nothing) and generates.

    With `chat` the messages are the whole content of the session: it keeps the tokens that it has in common with them
    and drops the rest. With `conversation` instead of `session` the daemon chooses the session, and the prompt is its
    whole content."""

    session: Name = ""
    conversation: Conversation | None = None
    text: str | None = None
    chat: ChatInput | None = None  # instead of text and token ids
    token_ids: TokenList | None = None
    packed_ids: PackedTokens = b""  # instead of a long list of token ids
    # None: up to the end of the context; UNSET: DEFAULT_TOKENS, or fewer at the end of the context; 0: the prompt is
    # computed, and no token is chosen. A number for which the context has no room is refused.
    max_tokens: Whole | msgspec.UnsetType | None = msgspec.UNSET
    sampling: Sampling = Sampling()
    stop: Names = []
    stop_token_ids: TokenList = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # special tokens have no text in the reply
    parse_special: bool = True  # control strings in `text` become control tokens
    prefix_space: bool | None = None  # before `text`, where the tokenizer puts one; None: if it starts the session
    logprobs: Whole | None = None  # None: off; n: of the chosen token and of the n likeliest
    prompt_logprobs: Whole | None = None  # None: off; n: of each prompt token and of the n likeliest
    token_bytes: bool = False  # the reply has the bytes of its tokens: see Piece
    stream: bool = False  # Pieces as they come; otherwise only the final reply
    expected_tokens: Whole = 0  # tokens that are likely to be generated; 0: not known
    deadline_s: float = 0.0  # seconds from now until the last token is wanted; 0: none
    between_tokens_s: float | None = None  # target of the time between tokens; 0: none; None: that of the class
    first_token_s: float | None = None  # target of the time to the first token, likewise
    resume: bool = False  # goes on, without a prompt, from where the last call stopped at a breakpoint
    hit: HitInfo | None = None  # with resume: goes on from this hit instead; the session is at its `end`
    capture: Names = []  # points whose activations are wanted: see Generated
    format: OutputFormat | None = None  # the output has this form, and ends where the form ends

    @property
    def most_tokens(self) -> int:
        """`max_tokens` as a number. The daemon has replaced None before it asks (admission.most_tokens)."""
        if self.max_tokens is msgspec.UNSET:
            return DEFAULT_TOKENS
        assert self.max_tokens is not None
        return self.max_tokens


class KeepRecord(Request, tag="keep_record"):
    """Makes a record: the present tokens of an idle session of the caller, and `body`, bytes that the daemon does not
    read. Answered by RecordKept. Calls can go on from the record after the session is closed. A record of the caller
    with the same name is replaced."""

    session: Name = ""  # "": a record of `model` without tokens, from which only chats can go on
    model: Name = ""
    body: bytes = b""
    record: RecordName = ""  # the record's name; "": the daemon makes one up


class GetRecord(Request, tag="get_record"):
    """Answered by Record."""

    record: RecordName


class DropRecord(Request, tag="drop_record"):
    """Answered by Done."""

    record: RecordName


class ListRecords(Request, tag="list_records"):
    """Answered by Records: the records of the caller, oldest first."""


class Embed(Request, tag="embed"):
    """Answered by Embedded: a vector for each of `texts`, or for each row of token ids in `packed` (32 bits a token).
    The model's final norm gives a row for each token; `pooling` takes the mean of the rows, or the last row."""

    model: Name
    texts: Annotated[list[str], msgspec.Meta(max_length=MAX_INPUTS)] = []
    packed: Annotated[list[PackedTokens], msgspec.Meta(max_length=MAX_INPUTS)] = []
    pooling: Literal["", "mean", "last"] = ""  # "": as configured for the model
    normalize: bool = True  # to length 1


class Forward(Request, tag="forward"):
    """Extends the session by the tokens and answers with the logits of each."""

    session: Name
    token_ids: TokenList = []
    packed_ids: PackedTokens = b""


class AddBreakpoint(Request, tag="breakpoint"):
    """Answered by BreakpointAdded. Calls of the session stop when one of these positions has come to the point, which
    lies between two blocks; the reply of Generate then has a `hit`."""

    session: Name
    point: Name
    when: When = "every"
    every: Whole = 1
    positions: Wholes | None = None


class EndBreakpoints(Request, tag="end_breakpoints"):
    """Removes these breakpoints; None: all. Answered by Done."""

    session: Name
    breakpoints: Wholes | None = None


class ListBreakpoints(Request, tag="breakpoints"):
    """Answered by Breakpoints."""

    session: Name


class AddFunction(Request, tag="function"):
    """Answered by Done. RunFunctions calls the function in the caller's intervention process when the session has
    stopped at this breakpoint. It replaces an earlier function there, and ends with the breakpoint or with that
    process."""

    session: Name
    breakpoint: Whole
    code: bytes  # cloudpickle, of at most MAX_CODE bytes
    python: Name  # the version of Python that compiled the code: functions.PYTHON


class RunFunctions(Request, tag="run_functions"):
    """Calls the functions of these breakpoints, one after another on the same activation, and makes the edits that they
    want. Answered by Done. The session is at a hit; the descriptor is the hit's window, and `captured` its form."""

    descriptors: ClassVar[int] = 1

    session: Name
    breakpoints: Wholes
    captured: Captured


class AddEdit(Request, tag="edit"):
    """Answered by EditAdded. At these points, the session's activations are changed from now on:

        add          a + scale v
        scale        a scale
        project_out  a without `scale` of its part along v
        replace      v
        clamp        the part of a along v, in units of v's length, is brought between `low` and `high`

    Without `positions` the edit applies where the next token is chosen, and at all later positions. With `positions`,
    ascending, it applies there only, and positions that have been computed already are computed again. `values` holds
    v: `rows` rows of the points' width in `dtype`; none for scale, otherwise one, or one for each position."""

    session: Name
    points: Names
    op: Op = "add"
    scale: float = 1.0
    low: float | None = None
    high: float | None = None
    positions: Wholes | None = None
    rows: Whole = 0
    dtype: Dtype = "float32"
    values: bytes = b""


class EndEdits(Request, tag="end_edits"):
    """Ends these edits of the session; None: all. Positions that they have changed stay as they are. Answered by
    Done."""

    session: Name
    edits: Wholes | None = None


class ListEdits(Request, tag="edits"):
    """Answered by Edits: the edits of the session, and ended ones that have changed positions."""

    session: Name


class Tokenize(Request, tag="tokenize"):
    """The tokens of a text that starts a session, or of a chat up to the beginning of the answer. Answered by
    Tokenized. The model is loaded first if it is not loaded."""

    model: Name
    text: str = ""
    chat: ChatInput | None = None  # instead of the text
    add_special: bool = True  # the special tokens that the tokenizer puts around a text; a chat has its template's
    parse_special: bool = True  # control strings in `text` become control tokens
    token_texts: bool = False  # the reply has the text of each token, too


class Detokenize(Request, tag="detokenize"):
    """The text of a row of tokens, special tokens included. Answered by Detokenized."""

    model: Name
    token_ids: TokenList = []
    packed_ids: PackedTokens = b""


class DescribeTokenizer(Request, tag="describe_tokenizer"):
    """Answered by TokenizerInfo."""

    model: Name


class Truncate(Request, tag="truncate"):
    session: Name
    length: Whole


class GetTokens(Request, tag="tokens"):
    session: Name


class ExportSession(Request, tag="export"):
    """Answered by SessionExported. With `kv` the reply has the KV of all tokens; missing KV is computed first."""

    session: Name
    kv: bool = True


class ImportSession(Request, tag="import"):
    """Opens a session that has these tokens. Answered by SessionOpened, after Progress while the model is loaded.

    With `kv`, a descriptor comes with it: a memfd with the KV of the first `kv_tokens` tokens in this form, and nothing
    else; all of its memory reserved, sealed against shrinking and growing, and against writing or future writing. Such
    a session shares KV only with its forks, and ends with the engine that has it: SessionLost."""

    descriptors: ClassVar[int] = 1

    model: Name
    token_ids: TokenList = []
    packed_ids: PackedTokens = b""
    priority: Class | None = None  # None: the highest that the caller may have
    fingerprint: Name = ""  # of the model that made the tokens; "": any
    kv: KvLayout | None = None
    kv_tokens: Whole = 0


class Cancel(msgspec.Struct, tag="cancel"):
    """One-way: ends the request `target` of this connection; its final reply says `cancelled`."""

    target: Whole


class PauseSession(Request, tag="pause"):
    """Stops the session until ResumeSession and moves its pages from the device to `tier`. Answered by PauseReply when
    they are there. A call that runs goes on at resume; a call that comes meanwhile waits for that."""

    session: Name
    tier: Tier = "host"


class ResumeSession(Request, tag="resume"):
    """Answered by Done. A session that is not paused stays as it is."""

    session: Name


class SetPriority(Request, tag="set_priority"):
    """Changes the class of the session, and of a call that runs on it. Answered by Done."""

    session: Name
    priority: Class


class ExplainSession(Request, tag="why"):
    """Answered by WhyReply: why the session runs or waits."""

    session: Name


class GetQuotas(Request, tag="quotas"):
    """Answered by Quotas: of the caller; with `all`, for administrators, of every user that has a session."""

    all: bool = False


class PublishPrefix(Request, tag="publish_prefix"):
    """From now on the sessions of all users that begin with the first `tokens` tokens of this session (None: with all
    of them) share their pages. Answered by PrefixPublished. For administrators: docs/guide/sessions.md says what it
    reveals."""

    session: Name
    tokens: Whole | None = None


class ListPrefixes(Request, tag="prefixes"):
    """Answered by Prefixes. For administrators."""


class WithdrawPrefix(Request, tag="withdraw_prefix"):
    """Answered by PrefixWithdrawn. For administrators."""

    prefix: Name


class AddToken(Request, tag="add_token"):
    """Answered by TokenAdded. For administrators, as are the next two."""

    name: Name
    user: Name = ""  # name or number of the Unix user for whom it stands; "": it stands for its own name
    highest_class: Class | None = None  # of sessions that connections with it use; None: as for its principal
    expires_s: float = 0.0  # seconds from now until it ends; 0: never


class ListTokens(Request, tag="list_tokens"):
    """Answered by TokensListed."""


class RevokeToken(Request, tag="revoke_token"):
    """Ends the token and closes the connections that came with it. Answered by Done."""

    name: Name


class GetStatus(Request, tag="status"):
    check: bool = False  # audits the pools, too; StatusReply.integrity has what was found


class GetTrace(Request, tag="trace"):
    """Records what the device does in its next `steps` steps or `seconds`, whichever end first. For administrators."""

    steps: Whole = 4
    seconds: float = 10.0


class ListSessions(Request, tag="sessions"):
    pass


class ListModels(Request, tag="models"):
    pass


class LoadModel(Request, tag="load"):
    """Answered by Progress, and by ModelReply when the model is loaded. `keep_alive_s` also changes a model that is
    loaded already."""

    model: Name
    kv_bytes: Whole = 0  # of device memory for pages; 0: as the daemon sees fit
    host_kv_bytes: Whole | None = None  # of host memory for pages; None: as configured; 0: none
    disk_kv_bytes: Whole | None = None  # of disk for pages; None: as configured; 0: none
    placing: Placing | None = None  # None: as configured
    keep_alive_s: float | None = None  # seconds without a call until it goes to sleep; None: as configured; 0: never
    chat_template: TemplateText = ""  # "": the configuration's, else the checkpoint's


class PlanModel(Request, tag="plan"):
    """The memory that loading would take, and the speed. Nothing is loaded, and nothing changes."""

    model: Name
    memory_bytes: Whole = 0  # 0: the device's budget
    kv_bytes: Whole = 0  # 0: as configured
    placing: Placing | None = None  # None: as configured


class HandOverFiles(Request, tag="hand_over_files"):
    """Hands over the open files of a checkpoint's folder, which prove that the caller may read them: the daemon opens
    no folder with more rights than the caller has. Answered by FilesHandedOver. With `adapter_of` the folder is a LoRA
    adapter's.

    A descriptor comes with it for each of the `names`: a regular file, open for reading. `folder` becomes the model's
    name and is not opened. `others` are the names of further files there; they help to explain a refusal."""

    descriptors: ClassVar[int] = MAX_FILES

    folder: Annotated[str, msgspec.Meta(max_length=4096)]
    names: Annotated[list[FileName], msgspec.Meta(max_length=MAX_FILES)]
    others: Annotated[list[FileName], msgspec.Meta(max_length=MAX_OTHERS)] = []
    adapter_of: Name = ""  # the adapter's model


class UnloadModel(Request, tag="unload"):
    model: Name
    force: bool = False  # closes the sessions that use it


class ListAdapters(Request, tag="adapters"):
    """Answered by Adapters: the configured adapters, and those that the caller has used. An administrator sees all."""


class LoadAdapter(Request, tag="load_adapter"):
    """Loads a LoRA adapter and its model. Sessions load it by themselves; this is done in advance. Answered by
    AdapterReply."""

    model: Name
    adapter: Name  # as in OpenSession


class UnloadAdapter(Request, tag="unload_adapter"):
    """Frees the memory of an adapter without sessions. Answered by Done."""

    model: Name
    adapter: Name  # its name in Adapters


class ShareModel(Request, tag="share"):
    """The first of two requests that hand a model over. Answered by ShareDescribed, which says what image of the
    weights the daemon wants.

    A descriptor comes with it: a memfd that begins with the `files` of the model, name → bytes, one after another.
    The share belongs to this connection, and ends limits.session_grace after it. If the caller shares the same
    `content` in the same way already, that share belongs to this connection, too, and ShareDescribed has the model."""

    descriptors: ClassVar[int] = 1

    model: Name  # "": the daemon makes a name up
    files: Files
    stored: Dtype  # of the weights, as the client has them
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # to compute in
    kv_bytes: Whole = 0  # 0: as the daemon sees fit
    placing: Placing = Placing()
    public: bool = False  # other users may have sessions of it
    content: Name = ""  # a digest of files and weights, the same for the same ones; "": not known


class ShareWeights(Request, tag="share_weights"):
    """The second request. Answered by Progress, and by ModelReply when the model is loaded.

    A descriptor comes with it: a memfd with the image, sealed against shrinking, growing and writing."""

    descriptors: ClassVar[int] = 1

    share: Name


class EndShare(Request, tag="end_share"):
    """Ends a share: no new session may use the model, and it is unloaded when its last session ends. Answered by Done,
    also if there is no such share."""

    share: Name


class SetBudget(Request, tag="set_budget"):
    """Changes the device's budget while sessions run. Blocks that no longer fit are streamed; when there is room again,
    they become resident."""

    memory_bytes: Whole


class Restart(Request, tag="restart"):
    """The daemon drains and starts again as the same process. Answered by Done before it drains.

    `warm`: the loaded models stay in shared memory and are loaded again from there, and so do pages of sessions."""

    warm: bool = False

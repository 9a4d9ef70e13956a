"""What a client asks of the daemon, a struct a message. djinn_client.protocol has their union and the frames."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from djinn_client.bounds import Name, Names, PackedTokens, TokenList, Whole, Wholes
from djinn_client.breakpoints import HitInfo, When
from djinn_client.chat import ChatInput
from djinn_client.conversations import Conversation, RecordName
from djinn_client.edits import Captured, Op
from djinn_client.image import Dtype
from djinn_client.infos import Tier
from djinn_client.kv_layout import KvLayout
from djinn_client.model_files import MAX_FILES, MAX_OTHERS
from djinn_client.output_format import OutputFormat
from djinn_client.placing import Placing
from djinn_client.sampling import Sampling
from djinn_client.scheduling import Class

DEFAULT_TOKENS = 256

FileName = Annotated[str, msgspec.Meta(max_length=255)]
MAX_TEMPLATE = 1 << 20  # characters of a chat template
TemplateText = Annotated[str, msgspec.Meta(max_length=MAX_TEMPLATE)]
MAX_INPUTS = 2048  # of one Embed
Files = Annotated[dict[Name, Whole], msgspec.Meta(max_length=256)]


class Request(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """`descriptors`: how many may come with one at the most."""

    descriptors: ClassVar[int] = 0

    id: Whole


class Hello(Request, tag="hello"):
    """Answered by Welcome. With a token the connection is the token's principal's, on every transport, and without one
    the Unix user's. Where the token is unknown, expired or revoked: NotAuthenticated, and the end of the connection."""

    client: Name = ""
    token: Name = ""


class Ping(Request, tag="ping"):
    pass


class OpenSession(Request, tag="open"):
    model: Name
    priority: Class | None = None  # None: the highest that the caller may have


class AttachSession(Request, tag="attach"):
    session: Name


class ForkSession(Request, tag="fork"):
    """Opens a session with the model, the tokens and the KV of another one of the caller's, which is idle. They go
    their own ways from there."""

    session: Name
    priority: Class | None = None  # None: the other's


class CloseSession(Request, tag="close"):
    session: Name


class Generate(Request, tag="generate"):
    """Extends the session by the prompt (text or token ids, or nothing to go on from where it is) and generates. With
    `chat`, the messages are the whole session: it keeps the tokens that it has in common with them, and loses the
    others. With a conversation in the place of the session, the daemon chooses the session, and the prompt is all of
    its text."""

    session: Name = ""
    conversation: Conversation | None = None
    text: str | None = None
    chat: ChatInput | None = None  # in the place of text and token ids
    token_ids: TokenList | None = None
    packed_ids: PackedTokens = b""  # in the place of many token ids
    # None: to the end of the context, of which no call may want more; UNSET: DEFAULT_TOKENS, or to there. 0: the prompt
    # is computed, and no token is chosen.
    max_tokens: Whole | msgspec.UnsetType | None = msgspec.UNSET
    sampling: Sampling = Sampling()
    stop: Names = []
    stop_token_ids: TokenList = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # special tokens have no text in the reply
    parse_special: bool = True  # control strings in `text` become control tokens
    prefix_space: bool | None = None  # before `text`, where the tokenizer puts one; None: if it starts the session
    logprobs: Whole | None = None  # None: off; n: the chosen token's and the n likeliest
    prompt_logprobs: Whole | None = None  # None: off; n: each prompt token's, and the n likeliest
    token_bytes: bool = False  # what tokens stand for comes with them: see Piece
    stream: bool = False  # Pieces as they come; otherwise only the final reply
    expected_tokens: Whole = 0  # that are likely to be generated; 0: nobody knows
    deadline_s: float = 0.0  # from now, by which the last token is wanted; 0: none
    resume: bool = False  # goes on from where the last call stopped at a breakpoint; without a prompt
    hit: HitInfo | None = None  # with resume: from there, at whose `end` the session is, and not from its last call's
    capture: Names = []  # points whose activations are wanted: see Generated
    format: OutputFormat | None = None  # the output has this form, and ends where that does

    @property
    def most_tokens(self) -> int:
        """`max_tokens` as a number; in the place of None the daemon has put one (admission.most_tokens)."""
        if self.max_tokens is msgspec.UNSET:
            return DEFAULT_TOKENS
        assert self.max_tokens is not None
        return self.max_tokens


class KeepRecord(Request, tag="keep_record"):
    """Keeps the point at which the session is, an idle one of the caller's, with `body`, of which the daemon reads
    nothing. Answered by RecordKept. The record does not need the session: a call can go on from it when that is gone.
    A record of the caller's that has the same name is replaced."""

    session: Name = ""  # "": a record of `model` that has no tokens, for chats only
    model: Name = ""
    body: bytes = b""
    record: RecordName = ""  # its name; "": the daemon makes one up


class GetRecord(Request, tag="get_record"):
    """Answered by Record."""

    record: RecordName


class DropRecord(Request, tag="drop_record"):
    """Answered by Done."""

    record: RecordName


class ListRecords(Request, tag="list_records"):
    """Answered by Records: the caller's, the oldest first."""


class Embed(Request, tag="embed"):
    """Answered by Embedded: a vector for each text, or for each of `packed`, which has token ids of 32 bits each. The
    model's final norm gives a row for each token; `pooling` takes the mean of the rows, or the last row."""

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
    """Answered by BreakpointAdded. Calls of the session stop where one of the positions that it is about has come to
    the point, which lies between blocks: the reply of Generate then has a `hit`."""

    session: Name
    point: Name
    when: When = "always"
    every: Whole = 1
    positions: Wholes | None = None


class EndBreakpoints(Request, tag="end_breakpoints"):
    """None: all. Answered by Done."""

    session: Name
    breakpoints: Wholes | None = None


class ListBreakpoints(Request, tag="breakpoints"):
    """Answered by Breakpoints."""

    session: Name


class AddFunction(Request, tag="function"):
    """Answered by Done. RunFunctions calls it, in the caller's intervention process, where the session has stopped at
    this breakpoint; in the place of one that was there. It goes with the breakpoint, or with that process."""

    session: Name
    breakpoint: Whole
    code: bytes  # cloudpickle, of at most MAX_CODE bytes
    python: Name  # the version of Python that compiled the code: functions.PYTHON


class RunFunctions(Request, tag="run_functions"):
    """Answered by Done, when the edits are made that these functions want. The session is at a hit, whose window comes
    with this, in this form; they are called one after another, on the same activation."""

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

    From now on: where the next token is chosen, and after; or at `positions`, which may have been computed already, and
    then are computed again. `values` has v: `rows` rows of the points' width of `dtype`: none for scale, else one, or
    one for each of the positions. Positions are ascending."""

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
    """From now on these edits of the session change nothing; None: all. What they have changed stays. Answered by
    Done."""

    session: Name
    edits: Wholes | None = None


class ListEdits(Request, tag="edits"):
    """Answered by Edits: those that changed anything, too."""

    session: Name


class Tokenize(Request, tag="tokenize"):
    """The tokens of a text that starts a session, or of a chat with the beginning of the answer. Answered by Tokenized.
    The model is loaded first if it is not there."""

    model: Name
    text: str = ""
    chat: ChatInput | None = None  # in the place of the text
    add_special: bool = True  # the special tokens that the tokenizer puts around a text; a chat has its template's
    parse_special: bool = True  # control strings in `text` become control tokens
    token_texts: bool = False  # with the text of each token


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
    """Answered by SessionExported. `kv`: with the KV of all its tokens; what of it is not there is computed first."""

    session: Name
    kv: bool = True


class ImportSession(Request, tag="import"):
    """Opens a session that has these tokens. Answered by SessionOpened, after Progress while the model is loaded.

    With `kv`, a descriptor comes with it: a memfd with the KV of the first `kv_tokens` tokens in this form, and nothing
    else; all of its memory reserved, sealed against shrinking and growing, and against writing or future writing. Such
    a session shares no KV with others but its forks, and ends with the engine that has it: SessionLost."""

    descriptors: ClassVar[int] = 1

    model: Name
    token_ids: TokenList = []
    packed_ids: PackedTokens = b""
    priority: Class | None = None  # None: the highest that the caller may have
    fingerprint: Name = ""  # of the model that they are of; "": any
    kv: KvLayout | None = None
    kv_tokens: Whole = 0


class Cancel(msgspec.Struct, tag="cancel"):
    """One-way: ends the request `target` of this connection; its final reply says `cancelled`."""

    target: Whole


class PauseSession(Request, tag="pause"):
    """The session gets no step until ResumeSession, and its pages leave the device for `tier`, which is a lower one.
    Answered by PauseReply when they are there. What runs on it goes on at resume, what comes meanwhile waits."""

    session: Name
    tier: Tier = "host"


class ResumeSession(Request, tag="resume"):
    """Answered by Done. A session that is not paused stays as it is."""

    session: Name


class SetPriority(Request, tag="set_priority"):
    """The session has this class from now on, a call that runs on it too. Answered by Done."""

    session: Name
    priority: Class


class ExplainSession(Request, tag="why"):
    """Answered by WhyReply: why the session is running, or not."""

    session: Name


class GetQuotas(Request, tag="quotas"):
    """Answered by Quotas: the caller's; with `all`, for administrators, those of every user that has a session."""

    all: bool = False


class PublishPrefix(Request, tag="publish_prefix"):
    """Sessions of all users that begin with the first `tokens` tokens of this one share their pages from now on; None:
    all that it has. Answered by PrefixPublished. For administrators: see docs/sessions.md for what it tells."""

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
    user: Name = ""  # name or number of the Unix user that it stands for; "": for its own name
    highest_class: Class | None = None  # that connections with it may use; None: as its principal
    expires_s: float = 0.0  # from now; 0: never


class ListTokens(Request, tag="list_tokens"):
    """Answered by TokensListed."""


class RevokeToken(Request, tag="revoke_token"):
    """Nobody can connect with it from now on, and connections with it are closed. Answered by Done."""

    name: Name


class GetStatus(Request, tag="status"):
    check: bool = False  # audit the pools too: what was found is in StatusReply.integrity


class GetTrace(Request, tag="trace"):
    """What the device does in its next `steps` steps, or in `seconds`, whichever ends first. For administrators."""

    steps: Whole = 4
    seconds: float = 10.0


class ListSessions(Request, tag="sessions"):
    pass


class ListModels(Request, tag="models"):
    pass


class LoadModel(Request, tag="load"):
    """Answers with Progress until the model is there. `kv_bytes` 0, and None of the others: as the daemon sees fit.
    `keep_alive_s` holds for a model that is loaded already, too."""

    model: Name
    kv_bytes: Whole = 0
    host_kv_bytes: Whole | None = None  # for pages in host memory; 0: none
    disk_kv_bytes: Whole | None = None  # for pages on disk; 0: none
    placing: Placing | None = None  # None: as configured
    keep_alive_s: float | None = None  # without a call, after which it goes to sleep; 0: never
    chat_template: TemplateText = ""  # in the place of the checkpoint's; "": that, or the configuration's


class PlanModel(Request, tag="plan"):
    """What loading would come to. The model may be loaded or not, and nothing about it changes."""

    model: Name
    memory_bytes: Whole = 0  # 0: the device's budget
    kv_bytes: Whole = 0  # 0: as configured
    placing: Placing | None = None  # None: as configured


class HandOverFiles(Request, tag="hand_over_files"):
    """Hands over the open files of a checkpoint's folder, and with them the proof that the caller may read them; the
    daemon opens no folder with more rights than the caller has. Answered by FilesHandedOver.

    A descriptor comes with it for each of the `names`: a regular file, open for reading. `folder` is what the model is
    called, and is not opened. `others` are names of further files there, which explain a refusal."""

    descriptors: ClassVar[int] = MAX_FILES

    folder: Annotated[str, msgspec.Meta(max_length=4096)]
    names: Annotated[list[FileName], msgspec.Meta(max_length=MAX_FILES)]
    others: Annotated[list[FileName], msgspec.Meta(max_length=MAX_OTHERS)] = []


class UnloadModel(Request, tag="unload"):
    model: Name
    force: bool = False  # closes the sessions that use it


class ShareModel(Request, tag="share"):
    """The first of two requests that hand a model over. Answered by ShareDescribed: what the daemon wants to be given.

    A descriptor comes with it: a memfd that begins with the `files` of the model, name → bytes, one after another.
    The share belongs to this connection, and ends with it, when limits.session_grace is over."""

    descriptors: ClassVar[int] = 1

    model: Name  # "": the daemon makes a name up
    files: Files
    stored: Dtype  # of the weights, as the client has them
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # to compute in
    kv_bytes: Whole = 0  # 0: as the daemon sees fit
    placing: Placing = Placing()
    public: bool = False  # other users may have sessions of it, too


class ShareWeights(Request, tag="share_weights"):
    """The second. Answers with Progress until the model is there.

    A descriptor comes with it: a memfd that is the image, sealed against shrinking, growing and writing."""

    descriptors: ClassVar[int] = 1

    share: Name


class EndShare(Request, tag="end_share"):
    """No new session may use the model; when the last has gone, it goes. Done also where there is no such share."""

    share: Name


class SetBudget(Request, tag="set_budget"):
    """Changes the device's budget while sessions run: blocks that no longer fit stream, or become resident again."""

    memory_bytes: Whole


class Restart(Request, tag="restart"):
    """The daemon drains and starts again as the same process. Answered by Done before it drains; sessions end with it.

    `warm`: what is in shared memory of the loaded models stays there, and they are loaded again from it."""

    warm: bool = False

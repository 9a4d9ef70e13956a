from __future__ import annotations

import itertools

import pytest

from djinn_client.protocol import Generate, Logprobs
from djinnd.server.text.generation import READ_AT_ONCE, Generation
from djinnd.text.chat.reply import ChatReply
from djinnd.text.detokenizer import Detokenizer
from djinnd.text.reader import ReadingRules, TextReader
from djinnd.text.replies.detection import reply_format
from djinnd.text.token_bytes import TokenBytes
from djinnd.text.vocabulary import Vocabulary

STORY = 'def greet(name):\n    return f"Größe 😀 {name}"\n'
PROMPT = [5, 6]
EOS = 0


class Recording:
    """A stream of text that records its tokens."""

    def __init__(self, stream):
        self.stream, self.asked = stream, []

    def feed_all(self, tokens):
        self.asked += tokens
        return self.stream.feed_all(tokens)

    def finish(self):
        return self.stream.finish()


class Play:
    """A generation that is given the tokens of a text, one by one."""

    def __init__(self, tokenizer, stop_tokens=(EOS,), has_text=True, before=(7,), chat=None, notes=(), **request):
        self.session = [*before, *PROMPT]
        self.clock = itertools.count(101)
        stops = request.get("stop", []) if chat is None else []
        self.stream = Recording(Detokenizer(tokenizer).stream(self.session))
        text = TextReader(self.stream, stops) if has_text else None
        message = Generate(id=9, session="s", token_ids=PROMPT, **request)
        naming = TokenBytes(tokenizer) if message.token_bytes else None
        fields = (message, self.session, len(PROMPT), frozenset(stop_tokens), text)
        self.generation = Generation(*fields, received=100.0, token_bytes=naming, chat=chat, notes=notes)
        self.pieces = []

    def feed(self, tokens, logprobs=None):
        for token in tokens:
            piece = self.generation.token(token, logprobs, float(next(self.clock)))
            if piece is not None:
                self.pieces.append(piece)

    def finish(self, reason="length"):
        return self.generation.finish(reason, computed=3, at=200.0)


@pytest.fixture
def story(tiny):
    return tiny.encode(STORY).ids


def test_collected_the_final_reply_has_everything(tiny, story):
    play = Play(tiny)
    play.generation.started(100.5)
    play.feed(story)
    reply = play.finish()
    assert play.pieces == []
    assert (reply.id, reply.text, reply.token_ids, reply.finish_reason) == (9, STORY, story, "length")
    assert play.session == [7, *PROMPT, *story]
    usage = reply.usage
    assert (usage.prompt_tokens, usage.generated_tokens) == (2, len(story))
    assert (usage.session_tokens, usage.computed_tokens) == (len(play.session), 3)
    assert (reply.timings.queued, reply.timings.first_token, reply.timings.total) == (0.5, 1.0, 100.0)


def test_it_is_full_with_the_last_token_that_was_asked_for_or_a_stop_token(tiny, story):
    for tokens, options in ((story, {"max_tokens": len(story)}), ([*story, EOS], {})):
        play = Play(tiny, **options)
        found = []
        for token in tokens:
            play.feed([token])
            found.append(play.generation.is_full)
        assert found == [False] * (len(tokens) - 1) + [True]
        assert play.stream.asked == story
        assert play.finish().text == STORY


def test_text_that_nobody_waits_for_is_read_many_tokens_at_a_time(tiny, story):
    def reads(**request):
        play = Play(tiny, **request)
        found = []
        for token in tokens:
            before = len(play.stream.asked)
            play.feed([token])
            found.append(len(play.stream.asked) - before)
        reply = play.finish()
        assert play.stream.asked == tokens
        assert "".join(piece.text for piece in [*play.pieces, reply]) == tiny.decode(tokens)
        return found

    tokens = (story * READ_AT_ONCE)[: 3 * READ_AT_ONCE]
    together = [reads() for _ in range(4)]
    for found in together:
        first, *others = [count for count in found if count]
        assert first <= READ_AT_ONCE and set(others) == {READ_AT_ONCE}
    at_a_time = [sum(count > 0 for count in step) for step in zip(*together, strict=True)]
    assert max(at_a_time) == 1, "they take turns"
    assert set(reads(stream=True)) == set(reads(stop=["never"])) == {1}


def test_streamed_each_text_and_each_token_comes_once(tiny, story):
    play = Play(tiny, stream=True)
    play.feed(story)
    last = play.finish()
    told = [*play.pieces, last]
    assert len(play.pieces) > 3
    assert "".join(piece.text for piece in told) == STORY
    assert [token for piece in told for token in piece.token_ids] == story
    assert all(piece.text and "�" not in piece.text for piece in play.pieces)


def test_without_a_tokenizer_the_pieces_are_tokens(tiny):
    play = Play(tiny, has_text=False, stream=True)
    play.feed([3, 4])
    assert [(piece.text, piece.token_ids) for piece in play.pieces] == [("", [3]), ("", [4])]
    assert play.finish().token_ids == []


def test_logprobs_come_with_their_tokens(tiny, story):
    play = Play(tiny, stream=True, logprobs=0)
    play.feed(story, Logprobs(-0.5))
    told = [*play.pieces, play.finish()]
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in told)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_text_and_session(tiny, story, stream):
    play = Play(tiny, stream=stream, stop=["nothing", "return"])
    play.feed(story)
    keep = play.generation.keep
    reply = play.finish("cancelled")
    told = [*play.pieces, reply]
    assert "".join(piece.text for piece in told) == STORY[: STORY.index("return")]
    assert [token for piece in told for token in piece.token_ids] == story[:keep]
    assert play.session == [7, *PROMPT, *story[:keep]]
    assert "return" in tiny.decode(story[:keep]) and "return" not in tiny.decode(story[: keep - 1])
    assert reply.finish_reason == "stop"
    assert play.generation.length == len(play.session)


def test_tokens_that_come_after_a_stop_string_change_nothing(tiny, story):
    play = Play(tiny, stop=["return"])
    play.feed(story)
    before = play.session[:]
    play.feed([1, 2, 3])
    assert play.session == before


def test_a_stop_string_may_begin_in_one_token_and_end_in_another(tiny, story):
    at = STORY.index("reet(na")
    play = Play(tiny, stream=True, stop=["reet(na"])
    play.feed(story)
    told = [*play.pieces, play.finish()]
    assert "".join(piece.text for piece in told) == STORY[:at]


def test_a_stop_string_that_only_the_end_completes(tiny):
    """The last bytes of a broken character are told when nothing follows."""
    tokens = tiny.encode("a😀").ids[:-1]
    play = Play(tiny, stop=["�"])
    play.feed(tokens)
    assert play.generation.keep is None
    reply = play.finish()
    assert (reply.text, reply.finish_reason) == ("a", "stop")
    assert play.session == [7, *PROMPT, *tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_the_session_s_but_says_nothing(tiny, stream):
    line = tiny.encode("\n").ids[0]
    words = tiny.encode("def greet").ids
    play = Play(tiny, stop_tokens=[EOS, line], stream=stream)
    play.feed([*words, line])
    reply = play.finish("stop")
    told = [*play.pieces, reply]
    assert "".join(piece.text for piece in told) == "def greet"
    assert [token for piece in told for token in piece.token_ids] == [*words, line]
    assert reply.finish_reason == "stop"


def test_cancelled_before_the_first_token(tiny):
    reply = Play(tiny).finish("cancelled")
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("", [], "cancelled")
    assert (reply.timings.queued, reply.timings.first_token) == (0.0, 0.0)
    assert reply.usage.session_tokens == 3


def test_an_unfinished_character_is_told_broken_when_nothing_follows(tiny):
    tokens = tiny.encode("a😀").ids[:-1]
    play = Play(tiny, stream=True)
    play.feed(tokens)
    assert play.finish("cancelled").text == "�"


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_is_named_once_and_so_are_those_that_logprobs_name(tiny, story, stream):
    play = Play(tiny, stream=stream, token_bytes=True, logprobs=1)
    play.feed(story, Logprobs(-1.0, {40: -2.0}))
    play.feed([EOS], Logprobs(-1.0, {41: -2.0}))
    told = [*play.pieces, play.finish()]
    named = [token for each in told for token in each.token_bytes]
    assert sorted(named) == sorted({*story, EOS, 40, 41})
    found = {token: text for each in told for token, text in each.token_bytes.items()}
    assert b"".join(found[token] for token in story).decode() == STORY
    known = set()
    for each in told:
        known |= each.token_bytes.keys()
        assert known >= {*each.token_ids}, "named with its piece at the latest"


def test_nothing_is_named_unless_that_is_asked_for(tiny, story):
    play = Play(tiny, logprobs=1)
    play.feed(story, Logprobs(-1.0, {40: -2.0}))
    assert play.finish().token_bytes == {} and play.generation.unnamed() == []


def test_stop_strings_count_behind_min_tokens(tiny, story):
    reader = Vocabulary(tiny, frozenset()).reader([], ReadingRules(["r", "\n"], least=8))
    text = reader.read(story) + reader.finish()
    assert reader.stopped_after > 8
    head = tiny.decode(story[:8])
    assert text.startswith(head) and "r" in head and "r" not in text[len(head) :]


ANSWER = '<think>a b</think>So: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
QWEN = reply_format("<think></think><tool_call>", {})


def test_a_chat_s_pieces_add_up_to_its_message(tiny):
    play = Play(tiny, chat=ChatReply(QWEN, "", {"f": {}}, []), stream=True)
    play.feed(tiny.encode(ANSWER).ids)
    reply = play.finish()
    told = [*play.pieces, reply]
    deltas = [each.delta for each in told if each.delta is not None]
    assert "".join(each.text for each in told) == reply.message.content == "So:"
    assert "".join(delta.reasoning for delta in deltas) == reply.message.reasoning == "a b"
    assert "".join(call.arguments for delta in deltas for call in delta.tool_calls) == '{"x": 1}'
    assert [call.name for call in reply.message.tool_calls] == ["f"]
    assert [token for each in told for token in each.token_ids] == tiny.encode(ANSWER).ids


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_a_chat_is_one_of_content(tiny, stream):
    tokens = tiny.encode("<think>stop</think>go and stop here").ids
    play = Play(tiny, chat=ChatReply(QWEN, "", {}, ["stop"]), stream=stream, stop=["stop"])
    play.feed(tokens)
    assert play.generation.keep < len(tokens)
    reply = play.finish()
    assert (reply.message.content, reply.message.reasoning, reply.finish_reason) == ("go and ", "stop", "stop")
    assert tiny.decode(play.session[3:]).endswith("stop")


def test_the_first_piece_has_the_notes(tiny, story):
    play = Play(tiny, stream=True, notes=["a", "b"])
    play.feed(story)
    assert [piece.notes for piece in play.pieces] == [["a", "b"], *[[]] * (len(play.pieces) - 1)]
    assert len(play.pieces) > 1

"""Requests to a model's tokenizer alone: the tokens of a text or a chat, the text of tokens, and its description."""

from __future__ import annotations

from djinn_client import protocol
from djinn_client.arguments.options import build
from djinn_client.errors import NoTokenizer
from djinn_client.protocol import Detokenized, Generate, Tokenized, TokenizerInfo
from djinnd.server.loading.models import ModelTable
from djinnd.server.models.text import ModelText
from djinnd.server.text.texts import Texts
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles

_MOST = 1 << 20  # tokens of one answer


class TokenizerRequests:
    def __init__(self, models: ModelTable, texts: Texts) -> None:
        self._models = models
        self._texts = texts

    @handles(protocol.Tokenize)
    async def tokenize(self, call: ClientCall, request: protocol.Tokenize) -> Tokenized:
        text, user = await self._text(call, request.model), call.client.user
        if request.chat is not None:
            prompt = await self._texts.prepare_chat(text, user, request.chat, [], _MOST)
        else:
            rules = {"text": request.text, "parse_special": request.parse_special, "prefix_space": True}
            asked = build(Generate, session="", **rules)
            prompt = await self._texts.prepare(text, user, asked, starts=request.add_special, room=_MOST)
        spelled = await self._texts.texts_of(text, user, prompt.tokens, spelled=True) if request.token_texts else []
        return Tokenized(id=call.id, token_ids=prompt.tokens, token_texts=spelled)

    @handles(protocol.Detokenize)
    async def detokenize(self, call: ClientCall, request: protocol.Detokenize) -> Detokenized:
        text = await self._text(call, request.model)
        (whole,) = await self._texts.texts_of(text, call.client.user, request.token_ids, spelled=False)
        return Detokenized(id=call.id, text=whole)

    @handles(protocol.DescribeTokenizer)
    async def describe(self, call: ClientCall, request: protocol.DescribeTokenizer) -> TokenizerInfo:
        _, text = await self._described(call, request.model)
        told = text.told
        return TokenizerInfo(
            id=call.id,
            has_text=told.has_text,
            has_chat=told.has_chat,
            bos_token=told.bos_token,
            eos_token=told.eos_token,
            eos_ids=told.eos,
            chat_template=told.template,
            config=told.config,
            generation_config=told.generation_config,
        )

    async def _text(self, call: ClientCall, name: str) -> ModelText:
        """Raises NoTokenizer where the model takes no text."""
        info, text = await self._described(call, name)
        if text.lacking:
            raise NoTokenizer(f"{info.name} has no text, as {text.lacking}")
        return text

    async def _described(self, call: ClientCall, name: str) -> tuple[protocol.ModelInfo, ModelText]:
        return (await self._models.once_loaded(name, call)).described

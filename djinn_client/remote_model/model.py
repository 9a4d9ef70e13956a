"""The remote model: it has the attributes and calls that transformers and its users expect of a causal model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PretrainedConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from djinn_client.errors import DjinnError, InvalidRequest
from djinn_client.handover.sharing import ModelHandle
from djinn_client.protocol import ModelInfo, TokenizerInfo
from djinn_client.remote_model.arguments import check_call, check_generate
from djinn_client.remote_model.generation import prepared
from djinn_client.remote_model.padding import batch_of, spread
from djinn_client.remote_model.rows import Served, sessions
from djinn_client.transport.beside import run_beside

if TYPE_CHECKING:
    from typing import Self

_IGNORED = -100  # the label of a position that has no part in the loss


class RemoteModel:
    """A model of the daemon, called as a transformers model is. `djinn.remote` makes one.

    Each row of a batch is a session of its own, and all rows run beside each other. Tensors come back on the device of
    `input_ids`. There are no gradients. docs/guide/remote-model.md says which arguments are honoured; all others raise
    InvalidRequest."""

    main_input_name = "input_ids"
    input_modalities = output_modalities = ("text",)
    device = torch.device("cpu")
    _prepare_generation_config: Any = GenerationMixin._prepare_generation_config  # pipelines call it, too

    def __init__(
        self,
        info: ModelInfo,
        served: Served,
        config: PretrainedConfig,
        generation_config: GenerationConfig,
        tokenizer: Any = None,
        handle: ModelHandle | None = None,
    ) -> None:
        self.info = info
        self.config = config
        self.generation_config = generation_config
        self.dtype: torch.dtype = getattr(torch, info.dtype)  # in which the daemon computes
        self._served = served
        self._tokenizer = tokenizer
        self._handle = handle

    @property
    def name_or_path(self) -> str:
        return self.info.name

    def can_generate(self) -> bool:
        return True

    def eval(self) -> Self:
        return self

    def to(self, *device: Any, **options: Any) -> Self:
        """The weights stay at the daemon. Raises InvalidRequest for another dtype."""
        for wanted in (*device, *options.values()):
            if isinstance(wanted, torch.dtype) and wanted != self.dtype:
                told = f"the daemon computes in {self.dtype}, not in {wanted}: share the model in that dtype"
                raise InvalidRequest(told, field="dtype")
        return self

    def close(self) -> None:
        """Ends the sharing of a model that this object has handed over. A second time does nothing."""
        if self._handle is not None:
            self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(*(() if error is None else (DjinnError,))):  # the caller must see the first error
            self.close()

    def __repr__(self) -> str:
        return f"<RemoteModel {self.info.name}, a {type(self).__name__}>"

    # --- calls --------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        labels: Any = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """`.logits`, float32 [rows, length, vocab], zeros at the padding; with `labels` also `.loss`. Raises
        InvalidRequest, PromptTooLong, TokenOutOfRange."""
        check_call(others)
        batch = batch_of(input_ids, attention_mask)
        expected = None if labels is None else _expected(labels, batch.mask)
        with sessions(self._served, len(batch.rows)) as opened:
            rows = run_beside([each.forward(row) for each, row in zip(opened, batch.rows, strict=True)])
        logits = spread([torch.from_numpy(row) for row in rows], batch.mask).to(batch.device)
        loss = None
        if expected is not None:
            loss = cross_entropy(logits[:, :-1].transpose(1, 2), expected.to(batch.device), ignore_index=_IGNORED)
        output = CausalLMOutputWithPast(loss=loss, logits=logits[:, -logits_to_keep:])
        return output.to_tuple() if return_dict is False else output

    forward = __call__

    def generate(
        self,
        inputs: Any = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        stopping_criteria: Any = None,
        streamer: Any = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> Any:
        """Prompts and outputs as transformers' `generate` returns them: int64 [rows, length], or a
        GenerateDecoderOnlyOutput. A row that is padded on the right gets the tokens that it gets without padding.

        Greedy tokens are the local model's as far as rounding allows. Sampled tokens have the same distribution;
        `torch.manual_seed` repeats them, but they differ from those of a local model with that seed.

        Raises InvalidRequest, PromptTooLong, TokenOutOfRange, and what `Session` raises."""
        config, others = self._prepare_generation_config(generation_config, **options)
        check_generate(others)
        call = prepared(
            config,
            input_ids if inputs is None else inputs,
            attention_mask,
            stopping_criteria=stopping_criteria,
            tokenizer=tokenizer or self._tokenizer,
            context=getattr(self.config, "max_position_embeddings", None),
            is_length_given=self._has_max_length(generation_config, options),
            vocab=self.info.vocab,
        )
        whole, logits = call.run(self._served, streamer)
        whole = whole.to(call.batch.device)
        if not config.return_dict_in_generate:
            return whole
        return GenerateDecoderOnlyOutput(sequences=whole, logits=logits)  # type: ignore[arg-type]  # any Tensor does

    def _has_max_length(self, given: GenerationConfig | None, options: dict[str, Any]) -> bool:
        """False: the maximum is transformers' default, which counts new tokens only."""
        said = [options.get("max_length"), self.generation_config.max_length, given and given.max_length]
        return any(each is not None for each in said)


def _expected(labels: Any, mask: Tensor) -> Tensor:
    """The labels of all positions but the first. Raises InvalidRequest where padding would have to predict one."""
    given = torch.as_tensor(labels).to("cpu")
    if given.shape != mask.shape:
        told = f"labels have the shape {tuple(given.shape)}; it must be that of input_ids, {tuple(mask.shape)}"
        raise InvalidRequest(told, field="labels")
    expected = given[:, 1:]
    if ((expected != _IGNORED) & ~mask[:, :-1]).any():
        told = f"there are labels behind padding: pad on the right, and give the padding the label {_IGNORED}"
        raise InvalidRequest(told, field="labels")
    return expected


# --- how it is made ---------------------------------------------------------------------------------------------------


def remote_model(
    info: ModelInfo, served: Served, config: PretrainedConfig, generation_config: GenerationConfig, *others: Any
) -> RemoteModel:
    """Pipelines know a model by the name of its class. So its class has the name of the architecture."""
    (name, *_) = config.architectures or [RemoteModel.__name__]
    kind = type(name, (RemoteModel,), {"__module__": RemoteModel.__module__, "__doc__": RemoteModel.__doc__})
    made: RemoteModel = kind(info, served, config, generation_config, *others)
    return made


def configs_of(info: ModelInfo, told: TokenizerInfo, given: Any) -> tuple[PretrainedConfig, GenerationConfig]:
    """The configurations of a model that is given by name: the daemon's files, or `given`, a PretrainedConfig or what
    AutoConfig.from_pretrained takes. Raises InvalidRequest."""
    with TemporaryDirectory() as folder:
        source = folder if given is None else given
        Path(folder, "config.json").write_bytes(told.config)
        if told.generation_config:
            Path(folder, "generation_config.json").write_bytes(told.generation_config)
        try:
            is_config = isinstance(given, PretrainedConfig)
            config = given if is_config else AutoConfig.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as error:
            wanted = f"transformers cannot read the configuration of {info.name}: give config=, an object or a folder"
            raise InvalidRequest(f"{wanted} ({error})", field="config") from error
        config.name_or_path = info.name
        try:
            return config, GenerationConfig.from_pretrained(folder)
        except OSError:
            return config, GenerationConfig.from_model_config(config)

"""Opens a remote model: the daemon gets the weights of a model in this process, or has the model already."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from djinn_client.admin.client import Client
from djinn_client.arguments.options import PlacingOptions
from djinn_client.errors import InvalidRequest
from djinn_client.handover.sharing import share_model
from djinn_client.remote_model.rows import Served
from djinn_client.transport.connection import OnProgress

if TYPE_CHECKING:
    from typing import Unpack

    from djinn_client.remote_model.model import RemoteModel


def remote(
    model: Any,
    *,
    address: str | None = None,
    token: str | None = None,
    tokenizer: Any = None,
    config: Any = None,
    generation_config: Any = None,
    kv_bytes: int = 0,
    on_progress: OnProgress | None = None,
    **placing: Unpack[PlacingOptions],
) -> RemoteModel:
    """A model that is called as a transformers model is, and computed by the daemon.

        remote = djinn.remote(model)
        remote.generate(**inputs, max_new_tokens=32)
        remote(**inputs).logits
        pipeline("text-generation", model=remote, tokenizer=tokenizer)

    model              a transformers model, which `share_model` hands to the daemon unless the daemon has the same
                       weights of this user already; or the name of a model that the daemon serves
    tokenizer          goes to the daemon with a transformers model's weights; `generate` takes it for `stop_strings`
    config             of a model given by name: its PretrainedConfig, or what AutoConfig.from_pretrained takes; None:
                       the daemon's
    generation_config  the defaults of `generate`; None: the model's own

    `address` and `token` are as for `Session`; `kv_bytes`, `on_progress` and `placing` are as for `load`.
    docs/guide/remote-model.md says which arguments of `generate` are honoured.

    Raises what `share_model` or `load` raises, and InvalidRequest where no configuration is found."""
    from djinn_client.remote_model.model import configs_of, remote_model  # and with it torch and transformers

    if isinstance(model, str | os.PathLike):
        with Client(address, token=token) as client:
            info = client.load(os.fspath(model), kv_bytes=kv_bytes, on_progress=on_progress, **placing)
            config, defaults = configs_of(info, client.tokenizer(info.name), config)
        generation_config, handle = generation_config or defaults, None
    elif not hasattr(model, "generation_config"):
        told = f"not {type(model).__name__}: share_model takes tensors and configurations of their own"
        raise InvalidRequest(f"a remote model is a transformers model or the name of a model, {told}", field="model")
    else:
        over: dict[str, Any] = {"kv_bytes": kv_bytes, "on_progress": on_progress, "reuse": True, **placing}
        handle = share_model(model, config, tokenizer, address=address, token=token, **over)
        info, config = handle.info, config or model.config
        generation_config = generation_config or model.generation_config
    served = Served(info.name, address, token)
    return remote_model(info, served, config, generation_config, tokenizer, handle)

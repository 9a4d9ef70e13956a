"""The laptop's part. It knows the line that `djinnctl token add --url` has printed, and nothing else of the server.

python -m tools.demo.remote.laptop LINE MODEL CHECKPOINT HOME
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import djinn_client as djinn
from djinn_client import Session
from tools.demo import page, scenes
from tools.two_machines import CLIENT_END, crossed

EDITED = "The sailors saw the"
FOLLOWED = "The capital of France is"


def visit(line: str, model: str, checkpoint: str, home: Path) -> None:
    page.title("On laptop: the line is pasted, and from now on a program needs no address")
    page.code("djinnctl trust djinns://djn_…")
    page.answer(scenes.output_of_djinnctl("trust", line).strip())
    with Session(model) as session:
        scenes.djinnctl("ps")
        scenes.in_a_session(session)
        scenes.paused(session)
        scenes.forked(session)
        saved(session, home / "talk.djinn")
    scenes.steered(model)
    stopped(model)
    as_a_model(checkpoint)


def saved(session: Session, file: Path) -> None:
    page.title("Saved to a file of the laptop; the session may end, and goes on from the file")
    page.code(f's.save("{file.name}"); s.close()')
    session.save(file)
    session.close()
    page.note(f"The file has {file.stat().st_size / 1e3:.1f} kB: the tokens. KV is computed again.")
    page.code(f't = djinn.Session.load("{file.name}")')
    with Session.load(file) as loaded:
        page.code("t.chat('Say it once more.')")
        scenes.ask(loaded, "Say it once more.")


def stopped(model: str) -> None:
    page.title("Stopped inside the model: an activation comes here, is edited, and goes back")
    point = scenes.middle_point(model)
    with Session(model) as session:
        page.code(f's.breakpoint("{point}")\nhit = s.run({EDITED!r})')
        session.breakpoint(point)
        hit = session.run(EDITED)
        if not isinstance(hit, djinn.Hit):
            raise scenes.DemoFailed(f"no breakpoint has stopped the session: {hit}")
        page.note(f"It waits at {point}; hit.activation is {list(hit.activation.shape)} here.")
        page.code("hit.activation[:, -1] *= 0.5\ns.resume(max_tokens=12)")
        hit.activation[:, -1] *= 0.5
        went_on = session.resume(max_tokens=12)
        if isinstance(went_on, djinn.Hit):
            raise scenes.DemoFailed("the session stopped twice")
        page.answer(went_on.text)


def as_a_model(checkpoint: str) -> None:
    page.title("A model of transformers in this process, its work over there")
    page.note("torch and transformers are imported: some seconds.")
    import transformers

    transformers.logging.disable_progress_bar()
    model, tokenizer = read(Path(checkpoint))
    inputs = tokenizer(FOLLOWED, return_tensors="pt")
    page.code("model = AutoModelForCausalLM.from_pretrained(…)\nremote = djinn.remote(model)")
    cable = Cable()
    remote = djinn.remote(model)
    weights = sum(weight.nbytes for weight in model.parameters())
    page.note(f"{cable.report()}: the weights, {size(weights)}, once.")
    page.code("again = djinn.remote(model)")
    djinn.remote(model).close()
    page.note(f"{cable.report()}: a digest, because gpu has these weights.")
    page.code("logits = remote(**inputs).logits")
    logits = remote(**inputs).logits
    page.note(f"{cable.report()}: token ids, and {list(logits.shape)} logits, {size(logits.nbytes)}.")
    page.code("remote.generate(**inputs, max_new_tokens=8, do_sample=False)")
    tokens = remote.generate(**inputs, max_new_tokens=8, do_sample=False)
    page.answer(str(tokenizer.decode(tokens[0])))
    page.note(f"{cable.report()}: token ids.")
    remote.close()


def read(checkpoint: Path) -> tuple[Any, Any]:
    """A folder's or a GGUF file's model and tokenizer, as transformers reads them."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if checkpoint.is_dir():
        return AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    where: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.parent, "gguf_file": checkpoint.name}
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # weights stay quantised otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(**where, **options), AutoTokenizer.from_pretrained(**where)


class Cable:
    """Tells what has crossed the cable since it was last asked."""

    def __init__(self) -> None:
        self._before = crossed(CLIENT_END)
        self._since = time.monotonic()

    def report(self) -> str:
        now, passed = crossed(CLIENT_END), time.monotonic()
        told = f"{size(now - self._before)} crossed the cable in {passed - self._since:.1f} s"
        self._before, self._since = now, passed
        return told


def size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"


def main(line: str, model: str, checkpoint: str, home: str) -> int:
    try:
        visit(line, model, checkpoint, Path(home))
    except KeyboardInterrupt:
        return 130
    except (scenes.DemoFailed, djinn.DjinnError) as error:
        print(f"on the laptop: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Steering: a direction that is found in some activations, and added to others.

A running daemon is all that this needs: `djinnd` in another terminal. Run it whole, or cell by cell in an editor that
knows `# %%`.
"""

# %% Does a method belong to an object, or to its class? Its first argument says so, self or cls.
from pathlib import Path

from tokenizers import Tokenizer

import djinn_client as djinn

MODEL = "djinn-tiny"
POINT = "blocks.5.hook_resid_post"
METHODS = [
    "class Stack(object):\n    def pop({}):\n        return",
    "class Queue:\n    def get({}):\n        return",
    "class Node(object):\n    def next({}):\n        return",
]
OTHER = "class Table(object):\n    def size(self):\n        return"  # that none of these is

info = djinn.Client().load(MODEL)
CLS = Tokenizer.from_file(str(Path(info.path) / "tokenizer.json")).encode(" cls").ids[0]


# %% The direction: the mean difference of the residual stream at the last token between the two cases.
def activation(text):
    with djinn.Session(MODEL) as s:
        return s.capture(POINT).run(text)[POINT][0, -1]


direction = sum(activation(text.format("cls")) - activation(text.format("self")) for text in METHODS) / len(METHODS)
print(f"the direction at {POINT} has length {direction.norm():.1f}")

# %% Steered by so much of it, the model goes on with a method of the class, though it reads "self".
with djinn.Session(MODEL) as s:
    s.capture(POINT).run(OTHER)
    for scale in (0, 0.5, 1, 1.5, 2):
        with s.fork() as t:
            t.steer(POINT, direction, scale=scale)
            logits = t.capture("logits").run()["logits"][0, -1]
            text = t.generate(max_tokens=12).text
        print(f"{scale:3} of it: {logits.softmax(-1)[CLS]:6.1%} for ' cls'; goes on with {text!r}")

# %% The other way about: without its part along the direction, a class method's activation no longer says what it is.
with djinn.Session(MODEL) as s:
    s.steer(POINT, direction, op="project_out")
    logits = s.capture("logits").run(METHODS[0].format("cls"))["logits"][0, -1]
    print(f"projected out: {logits.softmax(-1)[CLS]:6.1%} for ' cls' after {METHODS[0].format('cls')!r}")
    s.unsteer()
    s.truncate(0)
    logits = s.capture("logits").run(METHODS[0].format("cls"))["logits"][0, -1]
    print(f"and left alone: {logits.softmax(-1)[CLS]:6.1%}")

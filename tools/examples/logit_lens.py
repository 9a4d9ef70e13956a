"""The logit lens (nostalgebraist 2020): the model's next token if it stopped after each block.

The final norm and the head stay in the daemon. To apply them to block 3's output, a fork patches that output over the
last block's, and captures the logits.

A running daemon is all that this needs: `djinnd` in another terminal. Run it whole, or cell by cell in an editor that
knows `# %%`.
"""

# %% One run of the text, with what each block gives at each of its tokens.
from pathlib import Path

from tokenizers import Tokenizer

import djinn_client as djinn

MODEL = "djinn-tiny"
TEXT = "def copy(source, target):\n    if"
SHOWN = 5  # of its last tokens

info = djinn.Client().load(MODEL)
tokenizer = Tokenizer.from_file(str(Path(info.path) / "tokenizer.json"))

session = djinn.Session(MODEL)
cache = session.capture(["hook_embed", "blocks.*.hook_resid_post", "logits"]).run(TEXT)
*residuals, logits = cache
last = residuals[-1]

# %% Each of them through norm and head.
lens = {}
for name in residuals:
    with session.fork() as fork:
        fork.patch(cache[name], last)
        lens[name] = fork.capture("logits").run()["logits"][0].softmax(-1)


# %% The likeliest next token after each of the last tokens, block by block.
def shown(probabilities):
    best = int(probabilities.argmax())
    return f"{tokenizer.decode([best])!r:.9} {float(probabilities[best]):.0%}"


tokens = [tokenizer.decode([token]) for token in session.token_ids()]
print(f"{'after':26}" + "".join(f"{token!r:>16}" for token in tokens[-SHOWN:]))
for name in residuals:
    print(f"{name:26}" + "".join(f"{shown(row):>16}" for row in lens[name][-SHOWN:]))
print(f"{'the model itself':26}" + "".join(f"{shown(row):>16}" for row in cache[logits][0, -SHOWN:].softmax(-1)))

# %% Where it makes up its mind: how likely what it says in the end is, after each block.
said = int(cache[logits][0, -1].argmax())
for name in residuals:
    part = float(lens[name][-1, said])
    print(f"{name:26} {part:6.1%} {'#' * round(40 * part)}")
session.close()

"""Activation patching: where in the model is it known that this is a method of the class?

Two texts differ in one token, and the model goes on differently. Put what a block gives at one position from the one
run into the other: where that brings the first answer back, the difference is carried (Vig et al. 2020, Meng et al.
2022).

A running daemon is all that this needs: `djinnd` in another terminal. Run it whole, or cell by cell in an editor that
knows `# %%`.
"""

# %% Two texts, and one figure that tells them apart: by how much the logit of " self" is above that of " cls".
from pathlib import Path

from tokenizers import Tokenizer

import djinn_client as djinn

MODEL = "djinn-tiny"
CLEAN = "class Stack(object):\n    def pop(self):\n        return"
CORRUPTED = "class Stack(object):\n    def pop(cls):\n        return"

info = djinn.Client().load(MODEL)
tokenizer = Tokenizer.from_file(str(Path(info.path) / "tokenizer.json"))
SELF, CLS = (tokenizer.encode(word).ids[0] for word in (" self", " cls"))


def difference(cache):
    logits = cache["logits"][0, -1]
    return float(logits[SELF] - logits[CLS])


# %% The clean run, of which everything is kept; and the other one, which stays open.
with djinn.Session(MODEL) as s:
    clean = s.capture(["blocks.*.hook_resid_post", "logits"]).run(CLEAN)
    clean_ids = s.token_ids()
corrupted = djinn.Session(MODEL)
high, low = difference(clean), difference(corrupted.capture("logits").run(CORRUPTED))
ids = corrupted.token_ids()
assert len(ids) == len(clean_ids), "the texts must have their tokens at the same positions"
print(f"' self' over ' cls': {high:+.2f} in the clean run, {low:+.2f} in the other one")


# %% Each fork shares all KV before the position that is patched, and computes the rest.
def restored(block, position):
    with corrupted.fork() as fork:
        fork.patch(clean[f"blocks.{block}.hook_resid_post"], positions=[position])
        return (difference(fork.capture("logits").run()) - low) / (high - low)


first = next(n for n, (a, b) in enumerate(zip(clean_ids, ids, strict=True)) if a != b)  # before it, nothing differs
table = [[restored(block, position) for position in range(first, len(ids))] for block in range(info.blocks)]

# %% 100 %: with this one activation of the clean run, the model answers as there.
print("restored by what a block gives at a token:")
print(f"{'block':8}" + "".join(f"{tokenizer.decode([token])!r:>12}" for token in ids[first:]))
for block, row in enumerate(table):
    print(f"{block:<8}" + "".join(f"{part:>12.0%}" for part in row))
corrupted.close()

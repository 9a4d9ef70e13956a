"""An agent that waits for a tool: where its memory is meanwhile, and what is there when the answer comes.

It reads a file, thinks about a function that is to be added, looks up one that it does not know, tries two ways to go
on, and keeps one. djinn-tiny writes what looks like Python, and no more; with a larger model the calls are the same.

A running daemon is all that this needs: `djinnd` in another terminal. Run it whole, or cell by cell in an editor that
knows `# %%`.
"""

# %% The session is an agent's: it gives way to people, and comes before batches.
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import djinn_client as djinn

MODEL = "djinn-tiny"
FILE = Path(textwrap.__file__).read_text()[:4500]  # that it works on
TASK = f'{FILE}\n\n\ndef shorten_all(texts, width):\n    """Return'
SEARCH_S = 2.0  # how long the tool takes, as far as the agent knows

session = djinn.Session(MODEL, priority="agent")


def info():
    return next(info for info in djinn.sessions() if info.id == session.id)


def where():
    return f"{info().pages} pages on the device, {info().host_pages} on the host"


# %% Reason: what is the function to do?
thought = session.generate(TASK, max_tokens=20, stop=["\n", '"""'])
print(f"it thinks: Return{thought.text}")
print(f"before the search: {where()}")


# %% The tool is slow, and a process of its own.
def search(name):
    script = f"import pydoc, time; time.sleep({SEARCH_S}); print(pydoc.plain(pydoc.render_doc({name!r})))"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


# %% Act. While it waits the session needs no memory of the device; its pages are back shortly before the tool is done.
with session.io_wait(expected_s=SEARCH_S, tool="search"):
    searching = search("textwrap.shorten")
    while info().pages and searching.poll() is None:
        time.sleep(0.01)
    print(f"while it searches: {where()}")
    print(f"why: {session.why().reason}")
    found = searching.communicate()[0].splitlines()[2]
print(f"it has found: {found}")

# %% Observe: the session has its KV, so only the new tokens are run.
observed = session.capture("logits").run(f'"""\n    # {found}\n').generated
told, took = observed.usage, observed.timings.total
print(f"of {told.session_tokens} tokens {told.computed_tokens} were computed, which took {took * 1e3:.0f} ms")

# %% Try two ways to go on, each in a fork: shared pages are stored once. The likelier one is taken.
tried = {}
for way in ("    return", "    for"):
    with session.fork() as fork:
        answer = fork.generate(way, max_tokens=16, stop=["\n"], logprobs=0)
    tried[way] = sum(token.token for token in answer.logprobs) / len(answer.logprobs)
    print(f"{tried[way]:6.2f} a token: {way}{answer.text}")
best = max(tried, key=tried.get)

# %% Answer.
answer = session.generate(best, max_tokens=16, stop=["\n"])
print(f"its answer: {best}{answer.text}")

# %% What its calls waited for, as the daemon has measured it.
first, between = info().latency.first_token, info().latency.between_tokens
print(f"until the first token: {first.mean * 1e3:.0f} ms, mean of {first.count} calls")
print(f"between tokens: {between.mean * 1e3:.1f} ms, at worst {between.worst * 1e3:.1f} ms")
session.close()

"""llama.cpp for `eval.compare` and `eval.micro passes`, run where llama-cpp-python is.

    PYTHON eval/llama_cpp_worker.py MODEL.gguf THREADS CONTEXT

Reads a line of JSON for each answer, {"ids": [..], "count": N, "lookup": bool}, and prints one:
{"token_ids": [..], "first_s": seconds to the first token, "seconds": to the last}. Answers are
greedy and have `count` tokens whatever they say. {"front": [..]} is read as a context; {"rows":
[..]} then runs one pass behind it, to the logits of all rows; both print {}. Knows nothing of
selfspec.
"""

import json
import os
import sys
import time
from functools import cache
from itertools import islice
from typing import Any


def main(model: str, threads: str, context: str) -> None:
    """Until the input ends."""
    # what libraries print must not come between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    @cache
    def loaded(kind: str) -> Any:
        sizes = {"n_ctx": int(context), "n_threads": int(threads), "n_threads_batch": int(threads)}
        drafts = LlamaPromptLookupDecoding(num_pred_tokens=10) if kind == "lookup" else None
        every = kind != "plain"
        return Llama(model, draft_model=drafts, logits_all=every, verbose=False, **sizes)

    for line in sys.stdin:
        asked = json.loads(line)
        if "ids" in asked:
            kind = "lookup" if asked["lookup"] else "plain"
            answer = written(loaded(kind), asked["ids"], asked["count"])
        else:
            answer = run_pass(loaded("passes"), asked)
        print(json.dumps(answer), file=answers, flush=True)


def run_pass(llama: Any, asked: dict[str, list[int]]) -> dict[str, Any]:
    """A context, or rows behind it, which are forgotten again."""
    if "front" in asked:
        llama.reset()
        llama.eval(asked["front"])
    else:
        front = llama.n_tokens
        llama.eval(asked["rows"])
        llama.n_tokens = front
    return {}


def written(llama: Any, ids: list[int], count: int) -> dict[str, Any]:
    start, times, found = time.perf_counter(), [], []
    llama.reset()
    tokens = llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True)
    for token in islice(tokens, count):
        found.append(int(token))
        times.append(time.perf_counter() - start)
    return {"token_ids": found, "first_s": times[0], "seconds": times[-1]}


if __name__ == "__main__":
    main(*sys.argv[1:])

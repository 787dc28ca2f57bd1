"""llama.cpp for `eval.peers` and `eval.micro passes`, run where llama-cpp-python is.

    PYTHON eval/llama_cpp_worker.py MODEL.gguf THREADS CONTEXT

Reads a line of JSON for each answer, {"ids": [..], "count": N, "lookup": bool}, and prints one:
{"token_ids": [..], "first_s": seconds to the first token, "seconds": to the last}. Answers are
greedy and have `count` tokens whatever they say. {"front": [..]} is read as a context; {"rows":
[..]} then runs one pass behind it, to the logits of all rows; both print {}. Knows nothing of
selfspec.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(model: str, threads: str, context: str) -> None:
    """Until the input ends."""
    # what libraries print must not come between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    options: dict[str, Any] = {
        "model_path": model,
        "n_ctx": int(context),
        "n_threads": int(threads),
        "n_threads_batch": int(threads),
        "verbose": False,
    }
    plain, lookup, passes = Llama(**options), None, None
    for line in sys.stdin:
        asked = json.loads(line)
        if "front" in asked or "rows" in asked:
            passes = passes or Llama(**options, logits_all=True)
            run_pass(passes, asked)
            print("{}", file=answers, flush=True)
            continue
        if asked["lookup"] and lookup is None:
            drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
            lookup = Llama(**options, draft_model=drafts, logits_all=True)
        answer = written(lookup if asked["lookup"] else plain, asked["ids"], asked["count"])
        print(json.dumps(answer), file=answers, flush=True)


def run_pass(llama: Any, asked: dict[str, list[int]]) -> None:
    """A context, or rows behind it, which are forgotten again."""
    if "front" in asked:
        llama.reset()
        llama.eval(asked["front"])
        return
    front = llama.n_tokens
    llama.eval(asked["rows"])
    llama.n_tokens = front


def written(llama: Any, ids: list[int], count: int) -> dict[str, Any]:
    llama.reset()
    found, first, start = [], 0.0, time.perf_counter()
    for token in llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
        found.append(int(token))
        if len(found) == 1:
            first = time.perf_counter() - start
        if len(found) == count:
            break
    return {"token_ids": found, "first_s": first, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main(*sys.argv[1:])

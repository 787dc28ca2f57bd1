"""Runs other runtimes for `eval.compare` and `eval.micro passes`, in their own interpreters.

    PYTHON eval/rivals.py llama.cpp MODEL.gguf THREADS CONTEXT
    PYTHON eval/rivals.py openvino MODEL.gguf-OR-FOLDER THREADS CONTEXT

Reads a line of JSON for each answer, {"ids": [..], "count": N, "lookup": bool}, and prints one:
{"token_ids": [..], "first_s": seconds to the first token, "seconds": to the last}. Answers are
greedy and have `count` tokens; end tokens are ignored. {"front": [..]} sets a context; {"rows":
[..]} then runs one pass after it, to the logits of all rows; both print {} (only with llama.cpp).
Prompt lookup drafts 10 tokens. Does not import selfspec.
"""

import json
import os
import sys
import time
from functools import cache, partial
from itertools import islice
from typing import Any

DRAFTS = 10


@cache
def llama(model: str, threads: int, context: int, kind: str) -> Any:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    sizes = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads}
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=DRAFTS) if kind == "lookup" else None
    return Llama(model, draft_model=drafts, logits_all=kind != "plain", verbose=False, **sizes)


def by_llama(model: str, threads: int, context: int, request: dict[str, Any]) -> dict[str, Any]:
    """Generate an answer; or read a context; or run rows after it, then drop them."""
    if "ids" not in request:
        runtime = llama(model, threads, context, "passes")
        if "front" in request:
            runtime.reset()
        front = runtime.n_tokens
        runtime.eval(request.get("front") or request["rows"])
        if "rows" in request:
            runtime.n_tokens = front
        return {}
    runtime = llama(model, threads, context, "lookup" if request["lookup"] else "plain")
    start, times, token_ids = time.perf_counter(), [], []
    runtime.reset()
    tokens = runtime.generate(request["ids"], temp=0.0, top_k=1, repeat_penalty=1.0, reset=True)
    for token in islice(tokens, request["count"]):
        token_ids.append(int(token))
        times.append(time.perf_counter() - start)
    return {"token_ids": token_ids, "first_s": times[0], "seconds": times[-1]}


@cache
def openvino(model: str, threads: int, lookup: bool) -> Any:
    from openvino_genai import LLMPipeline  # type: ignore[import-not-found]

    drafts = {"prompt_lookup": True} if lookup else {}
    return LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **drafts)


def by_openvino(model: str, threads: int, _: int, request: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import openvino_genai
    from openvino import Tensor  # type: ignore[import-not-found]

    times: list[float] = []

    class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]  # it is not installed here
        def write(self, _: Any) -> Any:
            times.append(time.perf_counter() - start)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None: ...

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = request["count"], True, False
    if request["lookup"]:
        config.num_assistant_tokens, config.max_ngram_size = DRAFTS, 3
    runtime, ids = openvino(model, threads, request["lookup"]), np.array([request["ids"]])
    start = time.perf_counter()
    inputs = openvino_genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
    tokens = runtime.generate(inputs, config, Clock()).tokens[0]
    return {"token_ids": list(tokens), "first_s": times[0], "seconds": times[-1]}


def main(name: str, model: str, threads: str, context: str) -> None:
    # output of libraries must not mix with the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runtime = by_llama if name == "llama.cpp" else by_openvino
    answer = partial(runtime, model, int(threads), int(context))
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""/metrics says of requests what their own usage says, and of memory that it is free again."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from selfspec.api.speculator import Speculator
from tests.serve.live import LONG, Running, running, streaming, wait_until

ASK = [{"role": "user", "content": "Count: one, two, three, one, two, three. Again, ten times."}]
BODY = {"messages": ASK, "max_tokens": 24, "temperature": 0}

Figures = dict[tuple[str, ...], float]


def read(server: Running) -> Figures:
    """Samples by name and values of labels."""
    answer = httpx.get(f"{server.address}/metrics", timeout=20)
    assert answer.status_code == 200
    return {
        (sample.name.removeprefix("selfspec_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def asked(server: Running, **more: Any) -> Any:
    answer = server.post({**BODY, **more})
    assert answer.status_code == 200
    return answer.json()


def test_counters_are_the_sums_of_usage(small: Running) -> None:
    wishes: list[dict[str, Any]] = [{}, {"speculation": False}, {"n": 2, "temperature": 0.8}]
    before = read(small)
    answers = [asked(small, **wish) for wish in wishes]
    after = read(small)

    def more(*name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    usages = [answer["usage"] for answer in answers]
    drafts = [usage["speculation"] for usage in usages]
    written = sum(usage["completion_tokens"] for usage in usages)
    accepted = sum(one["num_accepted_tokens"] for one in drafts)
    assert accepted > 0
    assert more("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert more("generation_tokens_total") == written
    assert more("spec_decode_num_draft_tokens_total") == sum(
        one["num_draft_tokens"] for one in drafts
    )
    assert more("spec_decode_num_accepted_tokens_total") == accepted
    assert 0 < more("spec_decode_num_drafts_total") <= sum(one["rounds"] for one in drafts)
    for position in range(max(len(one["num_accepted_tokens_per_pos"]) for one in drafts)):
        by_place = [one["num_accepted_tokens_per_pos"][position:][:1] for one in drafts]
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert more(name, str(position)) == sum(map(sum, by_place))
    for source in {source for one in drafts for source in one["sources"]}:
        given = sum(one["sources"].get(source, {"accepted": 0})["accepted"] for one in drafts)
        assert more("tokens_by_source_total", source) == given
    assert more("tokens_by_source_total", "model") == written - accepted
    reasons = [choice["finish_reason"] for answer in answers for choice in answer["choices"]]
    for reason in set(reasons):
        assert more("request_success_total", reason) == reasons.count(reason)


def test_times_are_noted_once_and_a_prompt_that_comes_again_is_a_hit(small: Running) -> None:
    asked(small, speculation=False)
    before = read(small)
    usage = asked(small, speculation=False)["usage"]
    after = read(small)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    expected = {
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": usage["completion_tokens"] - 1,
        "e2e_request_latency_seconds_count": 1,
        "prefix_cache_queries_total": usage["prompt_tokens"],
        "prefix_cache_hits_total": cached,
    }
    assert {name: after[name,] - before[name,] for name in expected} == expected


def test_gauges_rise_and_return_to_nothing(tiny: Speculator) -> None:
    with running(tiny, concurrency=1) as narrow:
        with streaming(narrow, {**LONG, "n": 2}):
            busy = read(narrow)
        assert busy["num_requests_running",] == 1
        assert busy["num_requests_waiting",] == 1
        assert 0 < busy["kv_memory_bytes",] <= busy["kv_memory_limit_bytes",]
        wait_until(narrow.idle)
        idle = read(narrow)
        for name in ("num_requests_running", "num_requests_waiting", "kv_memory_bytes"):
            assert idle[name,] == 0
        assert idle["kv_memory_promised_bytes",] == 0
        assert idle["request_cancelled_total",] == 2


def test_refusals_are_counted_by_status(small: Running) -> None:
    before = read(small)
    for content in (b"{", b"{}", b"x" * 5_000_000):
        small.post(content)
    httpx.get(f"{small.address}/nothing")
    after = read(small)
    for status, count in (("400", 2), ("413", 1), ("404", 1)):
        name = "request_refused_total", status
        assert after[name] - before.get(name, 0) == count

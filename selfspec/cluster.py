"""Ray as selfspec starts it, and work that processes share, each with a model of its own.

A Ray of our own listens on loopback and wants a token of this run. RAY_ADDRESS names a cluster that
is there already, whose token Ray reads as `ray start` did. Needs the package ray.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray is imported
os.environ.setdefault("RAY_AUTH_MODE", "token")
if "RAY_ADDRESS" not in os.environ:
    os.environ["RAY_AUTH_MODE"] = "token"  # Ray runs what comes to its ports
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # a worker has it already
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # no cluster: all ports on loopback

import ray
from ray.exceptions import RayError, RayTaskError

from selfspec.errors import InvalidOption, SelfspecError, first_line
from selfspec.files import cores

CLUSTER = os.environ.get("RAY_ADDRESS")

Submit = Callable[[Any], Callable[[], Any]]  # begins a task; what it returns waits for the result

_TRIES = 3  # how often a task is given again to a worker that ended over it


@contextmanager
def started(address: str = "local", **options: Any) -> Iterator[None]:
    """Ray, until the context ends; `options`: more for `ray.init`. Raises InvalidOption."""
    if address == "local":
        options["include_dashboard"] = False
    try:
        ray.init(address=address, logging_level=logging.ERROR, namespace="selfspec", **options)
    except Exception as error:  # a busy machine, whose processes take too long, is a bare one
        raise InvalidOption(f"cannot use Ray at {address}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def workers(count: int, make: Callable[[], Callable[[Any], Any]]) -> Iterator[Submit]:
    """So many processes, in each of which what `make` returns does one task after the other.

    A worker that ends is started anew, and its task with it. Raises InvalidOption for more workers
    than a cluster has cores, or GPUs if it has some; SelfspecError where a worker ends again and
    again. What a task raises is raised where its result is waited for.
    """
    own: dict[str, Any] = {} if CLUSTER else {"num_cpus": max(count, cores())}
    with started(CLUSTER or "local", **own):
        found = ray.cluster_resources()
        cpus, gpus = int(found.get("CPU", 0)), int(found.get("GPU", 0))
        if count > (most := gpus or cpus):
            raise InvalidOption(f"workers is {count}, Ray has {most} {'GPUs' if gpus else 'cores'}")
        each = str(max(1, (cpus if CLUSTER else cores()) // count))
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", each)}
        kind = ray.remote(
            num_cpus=1,
            num_gpus=min(1, gpus),
            max_restarts=-1,
            max_task_retries=_TRIES,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": threads},
        )(_Worker)
        given = [ray.put(make)]  # in a list it stays one until a worker asks for it
        made: list[Any] = [kind.remote() for _ in range(count)]
        idle = SimpleQueue[Any]()
        for worker in made:
            idle.put(worker)

        def done(task: Any) -> Any:
            worker = idle.get()
            try:
                return ray.get(worker.do.remote(given, task))
            except RayTaskError as error:
                raise error.cause from None
            except RayError as error:
                raise SelfspecError(
                    f"a worker ended {_TRIES + 1} times over one batch: {first_line(error)}. If "
                    "memory was short, give fewer --workers or smaller batches"
                ) from error
            finally:
                idle.put(worker)

        waiting = ThreadPoolExecutor(count)
        try:
            yield lambda task: waiting.submit(done, task).result
        finally:
            waiting.shutdown(wait=False, cancel_futures=True)
            for worker in made:
                ray.kill(worker)
            waiting.shutdown()


def in_order(submit: Submit, ahead: int, tasks: Iterable[Any]) -> Iterator[Any]:
    """Results in the order of their tasks, of which at most `ahead` are under way."""
    begun = deque[Callable[[], Any]]()
    for task in tasks:
        begun.append(submit(task))
        if len(begun) == ahead:
            yield begun.popleft()()
    while begun:
        yield begun.popleft()()


class _Worker:
    """One process. It makes what works at its first task, so that errors are that task's."""

    def __init__(self) -> None:
        self._work: Callable[[Any], Any] | None = None

    def do(self, given: list[Any], task: Any) -> Any:
        if self._work is None:
            self._work = ray.get(given[0])()
        return self._work(task)

"""Start Ray, and share work among processes, each with its own model.

Our own Ray listens on loopback and requires a token that is made for this run. RAY_ADDRESS names an
existing cluster, whose token Ray reads as `ray start` did. Needs the package ray.
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
    os.environ["RAY_AUTH_MODE"] = "token"  # Ray runs any code sent to its ports
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # workers already have it
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # no cluster: all ports on loopback

import ray
from ray.exceptions import RayError, RayTaskError

from selfspec.errors import InvalidOption, SelfspecError, first_line
from selfspec.files import cores

CLUSTER = os.environ.get("RAY_ADDRESS")

Submit = Callable[[Any], Callable[[], Any]]  # starts a task; returns a function that awaits it

_TRIES = 3  # retries of a task after its worker died


@contextmanager
def run_ray(address: str = "local", **options: Any) -> Iterator[None]:
    """Run Ray until the context ends; `options` are for `ray.init`. Raises InvalidOption."""
    if address == "local":
        options["include_dashboard"] = False
    try:
        ray.init(address=address, logging_level=logging.ERROR, namespace="selfspec", **options)
    except Exception as error:  # Ray raises a bare Exception if its processes start too slowly
        raise InvalidOption(f"cannot use Ray at {address}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def workers(count: int, make: Callable[[], Callable[[Any], Any]]) -> Iterator[Submit]:
    """Start `count` processes; in each, the function that `make` returns does its tasks in turn.

    A worker that dies is restarted, with its task. Raises InvalidOption for more workers than the
    cluster has cores, or GPUs if it has any, and SelfspecError if a worker dies repeatedly. The
    error of a task is raised by the function that awaits its result.
    """
    options: dict[str, Any] = {} if CLUSTER else {"num_cpus": max(count, cores())}
    with run_ray(CLUSTER or "local", **options):
        resources = ray.cluster_resources()
        cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        if count > (most := gpus or cpus):
            raise InvalidOption(f"workers is {count}, Ray has {most} {'GPUs' if gpus else 'cores'}")
        share = str(max(1, (cpus if CLUSTER else cores()) // count))
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}
        actor = ray.remote(
            num_cpus=1,
            num_gpus=min(1, gpus),
            max_restarts=-1,
            max_task_retries=_TRIES,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": variables},
        )(_Worker)
        reference = [ray.put(make)]  # in a list, the reference is not resolved before a worker asks
        processes: list[Any] = [actor.remote() for _ in range(count)]
        idle = SimpleQueue[Any]()
        for worker in processes:
            idle.put(worker)

        def run_task(task: Any) -> Any:
            worker = idle.get()
            try:
                return ray.get(worker.do.remote(reference, task))
            except RayTaskError as error:
                raise error.cause from None
            except RayError as error:
                raise SelfspecError(
                    f"a worker ended {_TRIES + 1} times over one batch: {first_line(error)}. If "
                    "memory was short, give fewer --workers or smaller batches"
                ) from error
            finally:
                idle.put(worker)

        executor = ThreadPoolExecutor(count)
        try:
            yield lambda task: executor.submit(run_task, task).result
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            for worker in processes:
                ray.kill(worker)
            executor.shutdown()


def in_order(submit: Submit, ahead: int, tasks: Iterable[Any]) -> Iterator[Any]:
    """Yield results in the order of their tasks, with at most `ahead` tasks running."""
    pending = deque[Callable[[], Any]]()
    for task in tasks:
        pending.append(submit(task))
        if len(pending) == ahead:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


class _Worker:
    """One process. It calls `make` at its first task, so that errors are raised by that task."""

    def __init__(self) -> None:
        self._work: Callable[[Any], Any] | None = None

    def do(self, references: list[Any], task: Any) -> Any:
        if self._work is None:
            self._work = ray.get(references[0])()
        return self._work(task)

"""The program of a rank of ``horovod.run``: fetches the function, calls it, and sends back its result or its exception.

Runs as ``python -m horovod.runner.run_task``. The address of the rendezvous server and the job's secret come from the
environment.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from horovod._base import config
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.secret import decode_secret
from horovod.environments import identity
from horovod.runner import remote_call
from horovod.runner.remote_call import REMOTE_CALL_KEY, RemoteCall, Result

_TIMEOUT_SECONDS = 60.0


def main() -> int:
    """Returns the exit status: 1 if the function raised."""
    task: RemoteCall = remote_call.loads(remote_call.from_parts(REMOTE_CALL_KEY, _fetch) or b"")
    result = _call(task)
    rank = identity().rank  # only now: an elastic job may have given it another one
    with _connect() as client:
        for key, part in remote_call.to_parts(remote_call.result_key(rank), remote_call.dumps(result)):
            client.put(key, part)
    if result.traceback:
        print(result.traceback, end="", file=sys.stderr, flush=True)
        return 1
    return 0


def _call(task: RemoteCall) -> Result:
    try:
        value = task.run()
    except BaseException as error:  # SystemExit too: the caller waits for a value, and gets the reason instead
        if isinstance(error, Exception):
            sys.last_value = error  # as Python does for what ends a script; the runtime reports it to the other ranks
        text = "".join(traceback.format_exception(error.with_traceback(_users_part(error.__traceback__))))
        try:
            return Result(error=remote_call.dumps(error), traceback=text)
        except Exception:
            return Result(traceback=text)
    try:
        return Result(value=remote_call.dumps(value))
    except Exception:
        return Result(traceback=f"The value that the function returned cannot be sent back:\n{traceback.format_exc()}")


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without Horovod's own frames at its beginning, unless there are no others."""
    own = (__file__, remote_call.__file__)
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename in own:
        rest = rest.tb_next
    return rest or frames


def _connect() -> RendezvousClient:
    address = os.environ[config.RENDEZVOUS_ADDRESS], int(os.environ[config.RENDEZVOUS_PORT])
    return RendezvousClient(address, decode_secret(os.environ[config.SECRET_KEY]), _TIMEOUT_SECONDS)


def _fetch(key: str) -> bytes:
    with _connect() as client:
        return client.get(key, _TIMEOUT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

"""No launcher: a job of one process, so that no caller has to check whether the job is distributed."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from horovod._base.process_identity import ProcessIdentity
from horovod.environments.base import Environment


class Single(Environment):
    name = "none"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        return True

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        return ProcessIdentity(
            rank=0,
            size=1,
            local_rank=0,
            local_size=1,
            cross_rank=0,
            cross_size=1,
            hostname=socket.gethostname(),
            launcher=Single.name,
            job="",
        )

"""Ranks started by ``horovodrun`` or ``horovod.run``, or by another launcher that sets the same variables."""

from __future__ import annotations

from collections.abc import Mapping

from horovod._base import config
from horovod._base.process_identity import ProcessIdentity
from horovod.environments.base import Environment, EnvironmentVariables

_LOCAL = (config.LOCAL_RANK, config.LOCAL_SIZE)
_CROSS = (config.CROSS_RANK, config.CROSS_SIZE)


class HorovodRun(Environment):
    name = "horovodrun"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        return config.RANK in env or config.SIZE in env

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = EnvironmentVariables(
            env,
            HorovodRun.name,
            "start the script with `horovodrun -np N python ...`, or, to run it alone, "
            f"unset {config.RANK} and {config.SIZE}.",
        )
        size = read.number(config.SIZE)
        if size.value > 1 and not read.text(config.RENDEZVOUS_ADDRESS):
            raise read.error(
                f"{size.source}, but {config.RENDEZVOUS_ADDRESS} is not set, so the ranks have no rendezvous server"
            )
        one_host = size.value == 1 or read.text(config.LOCAL_SIZE) == read.text(config.SIZE)
        if not one_host and not all(
            map(read.text, _LOCAL + _CROSS)
        ):  # set by hand, without the local and cross numbers
            return read.without_local_ranks(
                rank=read.number(config.RANK), size=size, hostname=read.hostname(config.HOSTNAME)
            )
        return read.identity(
            rank=read.number(config.RANK),
            size=size,
            local_rank=read.number(config.LOCAL_RANK, 0),
            local_size=read.number(config.LOCAL_SIZE, 1),
            cross_rank=read.number(config.CROSS_RANK, 0),
            cross_size=read.number(config.CROSS_SIZE, 1),
            hostname=read.hostname(config.HOSTNAME),
            job="",
        )

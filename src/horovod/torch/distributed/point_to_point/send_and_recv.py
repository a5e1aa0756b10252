"""send and recv as methods of a group. The mailbox of this process carries the messages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from horovod.comm.datatypes import Array
from horovod.core.requests.handle import Handle
from horovod.observe.call_site import caller
from horovod.torch.distributed.arguments import check_peer, listed, only
from horovod.torch.distributed.flat_tensors import flat, writes_back
from horovod.torch.distributed.point_to_point.mailbox import Mailbox, mailbox_of
from horovod.torch.distributed.point_to_point.matching import ANY, ReceiveFilter
from horovod.torch.distributed.point_to_point.messages import Envelope
from horovod.torch.distributed.point_to_point.receiving import Receive
from horovod.torch.distributed.submission import Submitter
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.tensors import plain_view
from horovod.torch.uncompiled import uncompiled


@uncompiled
class PointToPoint:
    """The operations of a group between two ranks. The subclass makes ``_submitter``.

    Ranks are those in the group. Each method takes one tensor, or a list of one, and returns a work at once. The other rank
    must make the opposite call, with a tensor of the same type and number of elements. Otherwise the receive fails with a
    MismatchError, and so does the send of a message above 64 KiB, on one host above 32 KiB (a smaller one is done when it is
    sent).
    """

    _submitter: Submitter

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> HorovodWork:
        submitter, tensor = self._submitter, only("send", "tensor", listed("send", tensors))
        check_peer("send", "destination", dstRank, tag, submitter.size)
        data = _plain_bytes(tensor)
        if data is None:
            data = _bytes(flat(tensor).cpu())
        envelope = Envelope(submitter.membership.number, submitter.index, tag, _name(tensor.dtype), data.size, caller())
        handle = Handle(lambda error, _=data: error)  # type: ignore[misc]  # keeps the memory alive until it is done
        self._mailbox().send(submitter.membership.ranks[dstRank], envelope, data, handle)
        return HorovodWork(handle, None, [tensor], "send", seconds=submitter.seconds)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> HorovodWork:
        check_peer("recv", "source", srcRank, tag, self._submitter.size)
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HorovodWork:
        check_peer("recv", "source", 0, tag, self._submitter.size)
        return self._receive(tensors, ANY, tag)

    def _receive(self, tensors: Any, source: int, tag: int) -> HorovodWork:
        submitter, tensor = self._submitter, only("recv", "tensor", listed("recv", tensors))
        data, finish = _plain_bytes(tensor), None
        if data is None:
            target = flat(tensor)
            buffer = target if target.is_cpu else torch.empty_like(target, device="cpu")
            data, finish = _bytes(buffer), writes_back([tensor], [buffer])
        handle = Handle()
        ranks = submitter.membership.ranks
        sources = tuple(ranks) if source == ANY else (ranks[source],)
        receive = Receive(data, _name(tensor.dtype), caller(), sources, handle)
        self._mailbox().receive(ReceiveFilter(submitter.membership.number, source, tag), receive)
        return HorovodWork(handle, None, [tensor], "recv", finish, submitter.seconds)

    def _mailbox(self) -> Mailbox:
        membership = self._submitter.membership
        membership.check()
        return mailbox_of(membership.generation, membership.store)


_name = lru_cache(maxsize=None)(lambda dtype: str(dtype).removeprefix("torch."))  # of a type, for messages


def _plain_bytes(tensor: torch.Tensor) -> Array | None:
    """The memory of a plain tensor; None for others, which :func:`flat` takes."""
    view = plain_view(tensor)
    return None if view is None or view.array.size < 2 else view.array.view(np.uint8)


def _bytes(tensor: torch.Tensor) -> Array:
    """The memory of a flat tensor in host memory."""
    return tensor.view(torch.uint8).numpy() if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8).numpy()

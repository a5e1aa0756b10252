"""The dictionary by which a member announces a request in full the first time, and as a small integer afterwards.

There is one on each connection to the coordinator. Only the sender adds to it, so an identifier never becomes invalid.
"""

from __future__ import annotations

from collections.abc import Iterable

from horovod.core.negotiation.messages import Definition, MessageError, Request


class RequestEncoder:
    """A member's dictionary, which abbreviates requests that were announced before.

    Args:
        capacity: the greatest number of names. If it is reached, a new name takes the identifier of the oldest.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: dict[str, tuple[Request, int]] = {}

    def __len__(self) -> int:
        """How many names it has now."""
        return len(self._known)

    def items(self, requests: Iterable[Request]) -> list[int | Definition]:
        """The items to send for these requests."""
        known = self._known
        return [
            found[1] if (found := known.get(each.name)) is not None and found[0] is each else self.item(each)
            for each in requests
        ]

    def item(self, request: Request) -> int | Definition:
        """The item to send for ``request``."""
        known = self._known.get(request.name)
        if known is not None:
            sent, identifier = known
            if sent == request:
                return identifier
        elif request.transient or self._capacity == 0:
            return Definition(-1, request)
        elif len(self._known) < self._capacity:
            identifier = len(self._known)
        else:
            oldest = next(iter(self._known))
            _, identifier = self._known.pop(oldest)
        self._known[request.name] = (request, identifier)
        return Definition(identifier, request)


class RequestDecoder:
    """The coordinator's side of one member's dictionary."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: dict[int, Request] = {}

    def __len__(self) -> int:
        """How many names it has now."""
        return len(self._known)

    def requests(self, items: Iterable[int | Definition]) -> list[Request]:
        """The requests that the items stand for. An unchanged request is the same object each time.

        Raises:
            MessageError: an identifier was never defined.
        """
        known = self._known
        try:
            return [known[item] if isinstance(item, int) else self._define(item) for item in items]
        except KeyError as error:
            raise MessageError(f"request {error} was never defined") from None

    def _define(self, item: Definition) -> Request:
        if 0 <= item.identifier < self._capacity:
            self._known[item.identifier] = item.request
        elif item.identifier != -1:
            raise MessageError(f"identifier {item.identifier} is beyond the capacity {self._capacity}")
        return item.request
